"""Requests from outside, answered by the engines of all ranks together.

HTTP server -> queue on rank 0 -> round: all that wait and are sampled alike -> all ranks -> rank 0 -> answers

A round is a call of `generate` on every rank, so it works with any engine: its ranks share the prompts as those of a
rollout. Requests that come meanwhile wait for the next round.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from aligner.engines.base import RolloutEngine
from aligner.errors import EngineError
from aligner.ops.agree import by_rank_0, raised_together
from aligner.ops.reduce import gathered
from aligner.rollout.completions import ScoredTokens
from aligner.rollout.served import Generated, PendingRequest, ScoringRequest, scored_tokens
from aligner.rollout.sharing import share
from aligner.types import STOP, SamplingParams

IDLE_S = 1.0  # after which the waiting ranks hear that there is nothing to do

Prompts = list[tuple[tuple[int, ...], int]]  # with their seeds
Round = tuple[Prompts, SamplingParams] | tuple[list[list[int]], int]


@dataclass
class EngineRounds:
    """The queue, and the rounds of all ranks. `around`: the context of a round on each rank."""

    engine: RolloutEngine
    pad_id: int
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    waiting: deque[PendingRequest | ScoringRequest] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _taken: list[PendingRequest | ScoringRequest] = field(default_factory=list)

    def put(self, asks: Sequence[PendingRequest | ScoringRequest]) -> None:
        with self.changed:
            self.waiting += asks
            self.changed.notify()

    def wake(self) -> None:
        """Let rank 0 look whether it is over."""
        with self.changed:
            self.changed.notify()

    def serve(self, over: Callable[[], bool]) -> None:
        """Answer until it is `over` on rank 0, and no request waits. Raises EngineError on every rank; the requests
        then have it as their answer. Collective over the world."""
        try:
            while (what := by_rank_0(partial(self._next, over))) is not None:
                if what:
                    with self.around():
                        answers = self._scored(*what) if isinstance(what[1], int) else self._generated(*what)
                    for ask, answer in zip(self._taken, answers, strict=True) if self._taken else ():  # on rank 0
                        ask.answer.set_result(answer)
                    self._taken = []
        except EngineError as error:
            for ask in (*self._taken, *self.waiting):
                if not ask.answer.done():
                    ask.answer.set_exception(error)
            raise

    def _next(self, over: Callable[[], bool]) -> Round | tuple[()] | None:
        """Take the requests of the next round; () if none came in `IDLE_S`, None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or over(), IDLE_S)
            if not self.waiting:
                return None if over() else ()
            first = self.waiting[0]
            alike: list[PendingRequest | ScoringRequest] = []
            left: deque[PendingRequest | ScoringRequest] = deque()
            for ask in self.waiting:
                together = ask is first if isinstance(first, ScoringRequest) else ask.sampling == first.sampling
                (alike if together else left).append(ask)
            self._taken = [ask for ask in alike if ask.answer.set_running_or_notify_cancel()]
            self.waiting = left
        if not self._taken:  # their clients have left
            return ()
        if isinstance(first, ScoringRequest):
            return first.tokens, first.top
        return [(ask.tokens, ask.seed) for ask in self._taken], first.sampling

    def _generated(self, prompts: Prompts, sampling: SamplingParams) -> list[Generated]:
        """Return rank 0's samples: the others ask for none, and their engines take a share."""
        own = prompts if dist.get_rank() == 0 else []
        with raised_together(EngineError):
            made = self.engine.generate([tokens for tokens, _ in own], [[seed] for _, seed in own], sampling)
        lengths = made.lengths.tolist()
        return [
            (made.tokens[i, :n].tolist(), made.logprobs[i, :n].tolist(), int(made.finish_reason[i]) == STOP)
            for i, n in enumerate(lengths)
        ]

    def _scored(self, tokens: list[list[int]], top: int) -> list[list[ScoredTokens]]:
        """Return the rows' scores, of each rank's replica a share; of engines on other ranks the first scores all."""
        score = partial(scored_tokens, self.engine, top=top, pad_id=self.pad_id)
        if self.engine.bridge is not None:
            return [score(tokens)]
        width = self.engine.tensor_parallel
        replicas, replica = dist.get_world_size() // width, dist.get_rank() // width
        return [[row for own in gathered(score(tokens[share(len(tokens), replicas, replica)]))[::width] for row in own]]
