"""The loop of a rank that only generates: it carries out the orders of the trainer's ranks (`engines/bridge.py`),
one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from aligner.config.sections.cluster import IDLE
from aligner.config.sections.engine import RefitConfig
from aligner.engines.bridge import DISMISS, Bridge
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.remote import fleet_of
from aligner.errors import AlignerError, RefitError
from aligner.ops.reduce import dealt, gathered
from aligner.refit.exchange import Exchange
from aligner.refit.factors import FactorExchange
from aligner.refit.transfer import any_rank, fail_together, largest, telling_the_others
from aligner.types import SamplingParams

Phase = Callable[[str], AbstractContextManager[None]]


class OrderServer:
    """A generation rank's side of the orders. `phase`, `memory`: contexts of each order and its work, named as the
    trainer's phases. `settle` is called after each generation. `trajectories` generates this rank's share of the
    requests of each rank of the job, for each of them. Errors of the engine, `trajectories`, `memory` and `settle` are
    raised on the trainer's ranks."""

    def __init__(
        self,
        bridge: Bridge,
        engine: FleetEngine,
        plan: Callable[[], Exchange | FactorExchange],
        config: RefitConfig,
        phase: Phase,
        memory: Phase,
        settle: Callable[[], None],
        trajectories: Callable[[list[list[Any]]], list[Any]] | None = None,
    ):
        self.bridge, self.engine, self.plan, self.config = bridge, engine, plan, config
        self.phase, self.memory, self.settle, self.trajectories = phase, memory, settle, trajectories
        self._work: Callable[[], Callable[[], object]]  # the last order of the trainer's ranks
        self._done: Callable[[], object] | AlignerError  # delivers its results to them

    def __call__(self) -> bool:
        """Serve until the dismissal; return whether the trainer's ranks ended well. Raises EngineError when they are
        lost."""
        orders: Mapping[str, Callable[..., None]] = {
            "plan": self._plan,
            "refit": self._refit,
            "logprobs": self._logprobs,
            "top_logprobs": lambda tokens, count: self._verify(lambda: self.engine.top_logprobs(tokens, count)),
            "decoded": self._decoded,
            "checksums": self._checksums,
            "generate": self._generate,
            "trajectories": self._trajectories,
            "deliver": self._deliver,
        }
        while True:
            with self.phase(IDLE):
                name, arguments = self.bridge.next_order()
            if name == DISMISS:
                return arguments[0]
            orders[name](*arguments)

    def _plan(self) -> None:
        """Plan the refit. The trainer's ranks report whether they hold the expected tensors."""
        with self.phase("refit"):
            self.exchange = self.plan()
            with suppress(RefitError), self.bridge.contact():
                fail_together("", self.bridge.group)

    def _refit(self, version: int, hold: bool) -> None:
        """Run the other half of `Refit`. The trainer handles a failure that all know of."""
        group, cause = self.bridge.group, ""
        with self.phase("refit"), self.memory("refit"):
            with telling_the_others(self.bridge):
                if not hold:
                    cause = self._load(version)
                status = [bool(cause), 0 if hold else self.exchange.wire_bytes]
                failed, _ = largest(status, self.exchange.device, self.config.timeout_s, group)
            if failed:
                with suppress(RefitError):
                    fail_together(cause, group)
            elif not hold:
                self.exchange.commit()

    def _load(self, version: int) -> str:
        """Load the weights; return the error, if any. Raises RefitError where the trainer's ranks cannot be reached."""
        cause = ""
        try:
            self.engine.begin_update(version)
        except RefitError as error:
            cause = str(error)
        self.exchange({}, self.engine, cause)
        # an engine of several ranks is filled on all of them or on none
        if any_rank(bool(self.exchange.cause), self.exchange.device, self.config.timeout_s):
            return self.exchange.cause
        try:
            self.engine.finish_update()
        except RefitError as error:
            return str(error)
        return ""

    def _logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float) -> None:
        self._verify(lambda: self.engine.logprobs(tokens, lengths, temperature))

    def _decoded(self, tokens: Tensor, lengths: Tensor, count: int) -> None:
        self._verify(lambda: self.engine.decoded(tokens, lengths, count))  # of an engine that has a process of its own

    def _checksums(self) -> None:
        self._verify(self.engine.checksums)

    def _verify(self, work: Callable[[], Any]) -> None:
        def within() -> Any:
            with self.memory("refit"), self.memory("verify"):
                return work()

        with self.phase("refit"):
            self.bridge.answer(within, self._version)

    def _generate(self, sampling: SamplingParams) -> None:
        """Generate. The trainer's ranks may train meanwhile: they ask for the samples later (`_deliver`)."""
        with self.phase("generate"):
            with self.bridge.contact():
                requests = fleet_of(self.bridge).gather([], [])

            def work() -> Callable[[], object]:
                fleet = fleet_of(self.bridge)
                served, generations, _ = self.engine.work(fleet, requests, sampling)
                return partial(fleet.deliver, served, generations, [], sampling.truncates)

            self._work = work
            self._do()

    def _trajectories(self) -> None:
        with self.phase("generate"):
            with self.bridge.contact():
                requests = gathered([], self.bridge.group)
            assert self.trajectories is not None
            trajectories = self.trajectories
            self._work = lambda: partial(dealt, trajectories(requests), self.bridge.group)
            self._do()

    def _do(self) -> None:
        try:
            with self.memory("generate"):
                self._done = self._work()
            self.settle()
        except AlignerError as error:
            self._done = error

    def _deliver(self) -> None:
        done = self._done

        def outcome() -> None:
            if isinstance(done, AlignerError):
                raise done

        with self.phase("generate"):
            if self.bridge.answer(outcome, self._version) and not isinstance(done, AlignerError):
                with self.bridge.contact():
                    done()

    def _version(self) -> int:
        return self.engine.weight_version
