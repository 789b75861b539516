"""Adapters' factors to engines in place of merged weights (`refit.adapters=factors`).

The frozen weights travel once, in the trainer's dtype. Of the matrices that have adapters each rank of an engine
keeps its share beside the weights that it computes with. From then on only A and B travel: every rank of an engine
gets all of them and merges its share anew, W + scale B A in float32, rounded once. Products of other shapes may
round differently, so B A is computed as on the trainer's rank, its shard's in one call, and cut afterwards. So an
engine holds bit-for-bit the merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import RolloutEngine, UpdateLedger
from aligner.errors import RefitError
from aligner.megatron.lora import change, joined
from aligner.models.adapters import MAGNITUDE, AdaptedMatrix, sites
from aligner.models.params import ParamSpec, assemble, dtype_of, split_tp
from aligner.models.shards import HfTensor, copy_elements
from aligner.ops.kernels.products import use_fast_products
from aligner.refit.exchange import Exchange
from aligner.refit.plan import EngineGrid, Plan, TensorSpan


class Share:
    """One engine rank's share of some tensors, in memory of its own, which an exchange writes as an engine's
    (`RolloutEngine.weight_view`). Views of other tensors come from `rest`."""

    def __init__(self, tensors: Sequence[HfTensor], engines: EngineGrid, rank: int, like: Tensor):
        self.tensor_parallel = engines.tensor
        index = engines.ranks.index(rank) % engines.tensor
        self.rest: RolloutEngine | None = None
        self.bounds = {t.name: t.interval(engines.tensor, index) for t in tensors}
        self._axes, self.held = {t.name: t.axis for t in tensors}, {}
        for t in tensors:
            low, high = self.bounds[t.name]
            shape = [high - low if axis == t.axis else size for axis, size in enumerate(t.shape)]
            self.held[t.name] = like.new_empty(shape, dtype=dtype_of(t.spec, like.dtype))
        self._ledger = UpdateLedger({t.name: t.shape for t in tensors})

    def begin(self) -> None:
        self._ledger.begin(0)

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """See `RolloutEngine.weight_view`. `afresh` is ignored: merged tensors are written beside others."""
        if name not in self.held:
            assert self.rest is not None, name
            return self.rest.weight_view(name, start, stop)
        return self.view(name, start, stop) if self._ledger.accept_shard(name, start, stop) else None

    def view(self, name: str, start: int, stop: int) -> Tensor:
        return self.held[name].narrow(self._axes[name], start - self.bounds[name][0], stop - start)

    def faults(self) -> str:
        """Return the faults of the tensors that came; empty if there are none."""
        for name, bounds in self.bounds.items():
            self._ledger.settle_shards(name, *bounds)
        return self._ledger.faults()


class Merger:
    """A rank of an engine's share of the frozen matrices that have adapters, all factors, and their sum."""

    def __init__(self, whole: Exchange, factors: Exchange, cfg: ModelConfig):
        like = torch.empty(0, dtype=whole.wire, device=whole.device)
        use_fast_products(like.device, like.dtype)  # the trainer's products, where this process has no trainer
        self.cfg, self.trainer, self.sites = cfg, whole.plan.trainer, sites(cfg)
        self._of_base: dict[str, list[HfTensor]] = {site.base.canonical: [] for site in self.sites}
        others = []
        for t in whole.plan.tensors:
            self._of_base.get(t.spec.canonical, others).append(t)
        engines, rank = whole.plan.engine, whole.rank
        self.base = Share([t for tensors in self._of_base.values() for t in tensors], engines, rank, like)
        self.factors = Share(factors.plan.tensors, factors.plan.engine, rank, like)
        index = engines.ranks.index(rank) % engines.tensor
        self._others = {t.name: t.interval(engines.tensor, index) for t in others}

    def keep(self, engine: RolloutEngine) -> None:
        """Count the tensors without adapters as written: they are unchanged since they travelled."""
        for name, (low, high) in self._others.items():
            if low < high:
                engine.weight_view(name, low, high)

    @torch.no_grad()
    def merge(self, engine: RolloutEngine) -> None:
        """Write every matrix that has adapters, shard by shard of the trainer."""
        for site in self.sites:
            for rank in range(self.trainer.shards(site.base) if site.base.tp_axis is not None else 1):
                for expert_rank in range(self.trainer.expert if site.base.experts else 1):
                    self._merge(site, rank, expert_rank, engine)

    def _merge(self, site: AdaptedMatrix, rank: int, expert_rank: int, engine: RolloutEngine) -> None:
        wanted = list(self._wanted(site, rank, expert_rank))
        if not wanted:
            return
        product, experts = self._change(site, rank, expert_rank), self.trainer.experts(site.base) * expert_rank
        for t, start, stop in wanted:
            view = engine.weight_view(t.name, start, stop)
            if view is None:
                continue
            base = self.base.view(t.name, start, stop)
            first, _ = t.interval(self.trainer.shards(site.base), rank)
            out = t.view(product, first, experts, start, stop).reshape(base.shape) + base.float()
            rows = self.factors.held.get(f"{t.name.removesuffix('.weight')}.{MAGNITUDE}")
            if rows is not None:
                out *= (rows if t.axis else rows[start:stop])[:, None]
            copy_elements(view, out.to(base.dtype))

    def _wanted(self, site: AdaptedMatrix, rank: int, expert_rank: int) -> Iterator[tuple[HfTensor, int, int]]:
        """Yield the spans of this rank's tensors that are in a shard of the trainer."""
        for t in self._of_base[site.base.canonical]:
            if site.base.experts and t.expert // self.trainer.experts(site.base) != expert_rank:
                continue
            (low, high), (first, last) = self.base.bounds[t.name], t.interval(self.trainer.shards(site.base), rank)
            if max(low, first) < min(high, last):
                yield t, max(low, first), min(high, last)

    def _change(self, site: AdaptedMatrix, rank: int, expert_rank: int) -> Tensor:
        """Return scale B A of a shard of the trainer, float32, in the shape of the matrix there."""
        tensor, shape = self.trainer.shards(site.base), list(site.base.shape)

        def own(spec: ParamSpec) -> Tensor:
            full = assemble(spec, [self.factors.held[name] for name in spec.hf], self.cfg)
            cut = split_tp(spec, full, tensor, rank)
            return cut.chunk(self.trainer.expert)[expert_rank] if spec.experts else cut

        factors = {target.index: (own(target.a), own(target.b)) for target in site.targets}
        if site.base.tp_axis is not None:
            shape[site.base.tp_axis] //= tensor
        if site.base.experts:
            shape[0] = self.trainer.experts(site.base)
        return change(*joined(factors, *site.rows(self.cfg, tensor)), self.cfg.lora.scale).view(shape)


class FactorExchange:
    """An exchange of factors, called like an `Exchange`. It runs two: `whole` once, of the weights without adapters,
    and `factors` at every run. The trainer's parameters are `SplitWeights`."""

    factored = True

    def __init__(self, whole: Exchange, factors: Exchange, cfg: ModelConfig):
        self.whole, self.factors = whole, factors
        self.lasting = whole.lasting = factors.lasting = False
        self.cause = ""
        self._based = False  # all engines have the weights without adapters
        self._ran: list[Exchange] = []
        self._merger = Merger(whole, factors, cfg) if whole.rank in whole.plan.engine.ranks else None

    @property
    def plan(self) -> Plan:
        """The plan of all weights of the engines."""
        return self.whole.plan

    @property
    def rank(self) -> int:
        return self.whole.rank

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def source(self, span: TensorSpan, parameters: Mapping[str, Tensor]) -> Tensor:
        return self.whole.source(span, parameters)

    @property
    def received_bytes(self) -> int:
        """The bytes of the last run, as in the properties below."""
        return sum(exchange.received_bytes for exchange in self._ran)

    @property
    def wire_bytes(self) -> int:
        return sum(exchange.wire_bytes for exchange in self._ran)

    @property
    def copied_bytes(self) -> int:
        return sum(exchange.copied_bytes for exchange in self._ran)

    @property
    def largest_share_bytes(self) -> int:
        return sum(exchange.largest_share_bytes for exchange in self._ran)

    def __call__(self, parameters: Mapping[str, Tensor], engine: RolloutEngine | None, cause: str = "") -> None:
        """See `Exchange.__call__`."""
        self.cause, merger = cause, self._merger
        self._ran = [self.factors] if self._based else [self.whole, self.factors]
        if merger is not None:
            merger.base.rest = engine
        for exchange in self._ran:
            share = None if merger is None else merger.base if exchange is self.whole else merger.factors
            self._run(exchange, parameters, share)
        if merger is None or engine is None or self.cause:
            return
        try:
            if self._based:
                merger.keep(engine)
            merger.merge(engine)
        except (RefitError, RuntimeError) as error:
            self.cause = str(error)

    def _run(self, exchange: Exchange, parameters: Mapping[str, Tensor], share: Share | None) -> None:
        if share is not None:
            share.begin()
        exchange(parameters, share, self.cause)
        self.cause = exchange.cause
        if share is not None and not self.cause and (faults := share.faults()):
            self.cause = f"the tensors to merge did not arrive complete: {faults}"

    def commit(self) -> None:
        """Note that a run has succeeded on every rank: from now on only factors travel. Before that, and after a
        failure, the weights that the engines keep may be incomplete."""
        self._based = True
