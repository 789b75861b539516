"""Move the trainer's weights into this rank's engine, and commit.

An engine that can be written in place gets its shards by the plan of `plan.py`, directly and without a gather. Any
other engine gets whole tensors, gathered over tensor ranks and broadcast over pipeline stages. Every rank runs the
refit together; an error on one rank stops all of them, with the first cause.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.on_demand import on_demand
from aligner.config.sections.engine import RefitConfig
from aligner.config.sections.model.config import ModelConfig, generating
from aligner.engines.base import RolloutEngine
from aligner.errors import RefitError
from aligner.megatron.train import ShardedModel
from aligner.models.adapters import factor_tensors
from aligner.models.params import dtype_of, hf_dtypes
from aligner.models.shards import HfTensor, hf_tensors
from aligner.ops import agree
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.ops.reduce import sum_halves
from aligner.refit.exchange import Exchange
from aligner.refit.plan import EngineGrid, TrainerGrid, plan_refit
from aligner.refit.stream import WeightStream
from aligner.types import ScalarMetrics

if TYPE_CHECKING:
    from aligner.engines.bridge import Bridge
    from aligner.refit.factors import FactorExchange

CAUSE_KEY = "aligner/refit/cause"  # in the store that all ranks share


class Refit:
    """A weight sync, called once per rollout: afterwards this rank's engine holds the trainer's weights and their
    version. `shape`: the model that the engine has, if not as the trainer's without layers that only it learns."""

    def __init__(
        self,
        model: ShardedModel,
        engine: RolloutEngine,
        config: RefitConfig,
        skip: bool = False,
        shape: ModelConfig | None = None,
    ):
        self.model, self.engine, self.config = model, engine, config
        self.shape = shape or generating(model.cfg)
        self.skip = skip  # test hook `debug.skip_refit`: the engine keeps its first weights
        self.checksums: dict[str, int] = {}
        self._hold, self._cause = False, ""
        self._held = -1  # the version of the last refit that succeeded
        self._parameters = model.weights()
        self.exchange: Exchange | FactorExchange | None = None
        self.stream: WeightStream | None = None
        self._bridge = engine.bridge
        self._group: dist.ProcessGroup | None = None
        if engine.can.in_place:
            if self._bridge is not None:
                self._bridge.order("plan")
            self.exchange = self._plan(engine)
        else:
            self.stream = WeightStream(model, config.bucket_bytes, self.shape)

    def _plan(self, engine: RolloutEngine) -> Exchange | FactorExchange:
        """Plan the exchange. Engines are on the trainer's ranks or on those after them, neighbours sharing one."""
        model, layout = self.model, self.model.layout
        self._group = None if self._bridge is None else self._bridge.group  # of all ranks with weights
        trainer = trainer_grid(model)
        if self._bridge is None:
            engines = EngineGrid(tuple(range(dist.get_world_size())), engine.tensor_parallel)
        else:
            engines = EngineGrid(self._bridge.engines, self._bridge.filled_together)
        dtypes = model.dtype, engine.dtype
        exchange = planned(trainer, engines, self.shape, dtypes, model.device, self.config, self._bridge)
        exchange.lasting = model.adapted is None
        named, cause = self._parameters, ""
        held = {t.spec.canonical for t in exchange.plan.tensors if layout.pp_rank in trainer.stages(t)}
        if not held <= set(named):
            cause = (
                f"the trainer's stage {layout.pp_rank} lacks {sorted(held - set(named))[:3]}, which the plan expects"
            )
        fail_together(cause, self._group)
        return exchange

    def __call__(self, again: bool = False) -> ScalarMetrics:
        """Sync the weights. `again`: also if the engines hold this version already (for measurements)."""
        start, self._cause = time.perf_counter(), ""
        current = self._current() and not again
        with telling_the_others(self._bridge):
            moved, wired = (0, 0) if current else self._transfer()
            group = None if current else self._group  # engines on other ranks are not asked if nothing is to be done
            seconds = time.perf_counter() - start
            if seconds > self.config.timeout_s and not self._cause:
                self._cause = f"it took {seconds:.1f} s, more than refit.timeout_s={self.config.timeout_s:g}"
            status = [bool(self._cause), wired]
            failed, most = largest(status, self.model.device, self.config.timeout_s, group)
        if failed:
            fail_together(self._cause, group)
        self._held = self.model.step_count
        if self.exchange is not None and not current and not self._hold:
            self.exchange.commit()
        return {
            "refit/seconds": seconds,
            "refit/bytes": float(moved),
            "refit/wire_bytes": float(wired if self._bridge is None else most),
            "refit/gb_per_s": moved / seconds / 1e9,
            "refit/version": float(self.model.step_count),
        }

    def _current(self) -> bool:
        """Return whether the engines hold this very version (an evaluation between two rollouts, a rollout after
        one): then nothing is sent. The same on every rank: a version is held after a commit of all."""
        return self.model.step_count == self._held == self.engine.weight_version

    def _transfer(self) -> tuple[int, int]:
        """Return the bytes written into this rank's engine (without one: into the fullest rank's), and the bytes
        that came to this rank from others."""
        version, self._held = self.model.step_count, -1
        self._hold = self.skip and self.engine.weight_version >= 0
        if self._bridge is not None:
            self.engine.order_update(version, self._hold)
        self._ask(self.engine.begin_update, version)
        moved = self._placed() if self.exchange is not None else self._streamed()
        self._ask(self.engine.finish_update)
        return moved

    def _placed(self) -> tuple[int, int]:
        exchange = self.exchange
        assert exchange is not None
        factored, hashed = exchange.factored, self.config.verify == "checksum"
        parameters: Mapping[str, Tensor] = {}
        if hashed or not factored:
            parameters = self._parameters if exchange.lasting else self.model.weights()
        engine = self.engine if self._bridge is None else None
        if hashed:
            self.checksums = self._trainer_checksums(exchange, parameters)
        if self._hold:
            return 0, 0
        exchange(self.model.split_weights() if factored else parameters, engine, self._cause)
        self._cause = exchange.cause
        if engine is None:
            return exchange.largest_share_bytes, 0
        return exchange.copied_bytes + exchange.received_bytes, exchange.wire_bytes

    def _trainer_checksums(
        self, exchange: Exchange | FactorExchange, parameters: Mapping[str, Tensor]
    ) -> dict[str, int]:
        """Return the checksums of all tensors in the engine's dtype: each rank hashes the spans it owns; sums are
        over all."""
        tensors = exchange.plan.tensors
        halves = torch.zeros(len(tensors), 2, dtype=torch.int64)  # sums of the low and of the high 32 bits
        for span in exchange.plan.owned.get(exchange.rank, ()):
            kept = dtype_of(tensors[span.tensor].spec, self.engine.dtype)
            block = exchange.source(span, parameters).to(kept)
            value = tensors[span.tensor].checksum(block, span.start, span.stop)
            halves[span.tensor] += torch.tensor([value & 0xFFFFFFFF, value >> 32])
        return {t.name: value for t, value in zip(tensors, sum_halves(halves), strict=True)}

    def _streamed(self) -> tuple[int, int]:
        assert self.stream is not None
        moved, layout = 0, self.model.layout
        kept = hf_dtypes(self.stream.table(), self.engine.dtype)
        for bucket in self.stream:  # always consumed whole, even after a refusal: it is collective
            self._ask(self.engine.update_weights, bucket)
            for name, tensor in bucket:
                moved += tensor.numel() * tensor.element_size()
                if self.config.verify == "checksum":
                    self.checksums[name] = tensor_checksum(tensor.to(kept[name]))
        gathered = layout.tensor * layout.pipeline * layout.expert > 1
        return moved, moved if gathered else 0

    def _ask(self, action: Callable, *arguments) -> None:
        """Call the engine, unless it keeps its weights or has refused an earlier call."""
        if self._hold or self._cause:
            return
        try:
            action(*arguments)
        except RefitError as error:
            self._cause = str(error)


def trainer_grid(model: ShardedModel) -> TrainerGrid:
    return TrainerGrid.of(model.cfg, model.layout, model.layout.data)


def planned(
    trainer: TrainerGrid,
    engines: EngineGrid,
    model: ModelConfig,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    config: RefitConfig,
    bridge: Bridge | None = None,
) -> Exchange | FactorExchange:
    """Return this rank's exchange. `dtypes`: of trainer and engine. The smaller one travels; but where engines
    merge, the trainer's does, to which merged weights are rounded."""
    rank, group = (dist.get_rank(), None) if bridge is None else (bridge.rank, bridge.group)

    def exchange_of(engines: EngineGrid, tensors: tuple[HfTensor, ...], wire: torch.dtype) -> Exchange:
        plan = plan_refit(trainer, engines, tensors, wire.itemsize, config.bucket_bytes)
        return Exchange(plan, rank, device, wire, config.timeout_s, group)

    if bridge is not None:
        with bridge.contact():
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL wants all in a group's first call
    if config.adapters == "merged":
        return exchange_of(engines, hf_tensors(model), min(dtypes, key=lambda dtype: dtype.itemsize))
    whole = exchange_of(engines, hf_tensors(model), dtypes[0])
    # every engine's rank gets all of them
    factors = exchange_of(EngineGrid(engines.ranks), factor_tensors(model), dtypes[0])
    return on_demand("refit.adapters=factors")(whole, factors, model)


def any_rank(flag: bool, device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on any rank. Raises RefitError if one does not answer in time. Collective."""
    return bool(largest([flag], device, timeout_s, group)[0])


def largest(
    values: list[int], device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None
) -> list[int]:
    """Return, for each value, the largest of any rank. Raises RefitError if one does not answer in time. Collective."""
    if dist.get_world_size(group) == 1:
        return values
    largest_of, limit = torch.tensor(values, dtype=torch.int64, device=device), datetime.timedelta(seconds=timeout_s)
    try:
        dist.all_reduce(largest_of, op=dist.ReduceOp.MAX, group=group, async_op=True).wait(limit)
    except RuntimeError as error:  # of torch.distributed
        raise RefitError(f"not all ranks answered within {timeout_s:g} s: {str(error).splitlines()[0]}") from error
    return largest_of.tolist()


@contextmanager
def telling_the_others(bridge: Bridge | None = None) -> Iterator[None]:
    """Write an error down for the ranks that will wait for this one in vain, so that they raise the first cause."""
    try:
        yield
    except BaseException as error:
        cause = f"refit failed on rank {dist.get_rank() if bridge is None else bridge.rank}: {error}"
        with suppress(RuntimeError):  # the store lives on rank 0, which may be gone
            store = dist.distributed_c10d._get_default_store() if bridge is None else bridge.store
            cause = store.compare_set(CAUSE_KEY, "", cause).decode()
        if isinstance(error, RefitError):
            raise RefitError(cause) from error
        raise


def fail_together(cause: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise RefitError on every rank if any rank has a cause; the lowest rank's cause is the message. Collective."""
    agree.fail_together(cause, RefitError, group, "refit failed on rank {rank}: {cause}")
