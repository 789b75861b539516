"""How evenly a model's routers spread the tokens of an optimizer step, over all ranks, and what their auxiliary loss
needs to know of the step before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from aligner.config.sections.model.moe import MoeConfig
from aligner.megatron.groups import Layout
from aligner.megatron.moe import ExpertLayer
from aligner.ops.kernels.experts import balance_loss
from aligner.ops.reduce import max_over
from aligner.types import ScalarMetrics, TrainBatch


def tokens_of(micro_batches: Sequence[TrainBatch], layout: Layout) -> float:
    """Return the tokens of a minibatch. Collective over the data-parallel ranks."""
    # on the CPU: the host reads them at once
    tokens = torch.tensor(float(sum(int(b.lengths.sum()) for b in micro_batches)), dtype=torch.float64)
    dist.all_reduce(tokens, group=layout.pgs.dp)
    return float(tokens)


class ExpertLoad:
    """The layers of this pipeline stage; without experts nothing happens."""

    def __init__(self, module: torch.nn.Module, moe: MoeConfig, layout: Layout):
        self.layers = [layer for layer in module.modules() if isinstance(layer, ExpertLayer)]
        self.moe, self.layout = moe, layout
        self._device = next(module.parameters()).device

    def begin(self, micro_batches: Sequence[TrainBatch], run: Callable[[], object]) -> None:
        """Start counting. `run` makes a forward pass over the minibatch; called if the auxiliary loss is that of
        several micro-batches."""
        if not self.moe.num_experts:
            return
        for layer in self.layers:
            layer.reset()
        if not self.moe.aux_coef:
            return
        layout = self.layout
        tokens, count = tokens_of(micro_batches, layout), len(micro_batches)
        most, least = max_over(torch.tensor([count, -count]), layout.pgs.dp).tolist()
        whole = self.moe.aux_over == "minibatch"
        # with one micro-batch on every rank the pass itself sees the whole minibatch
        together = most == 1 if whole else most == -least and self.moe.aux_over == "running"
        for layer in self.layers:
            layer.tokens, layer.fractions = tokens, None
            layer.peers = layout.pgs.tp_dp_cp if together else layout.pgs.tp_cp
        if whole and most > 1:
            self._count_ahead(run)

    def _count_ahead(self, run: Callable[[], object]) -> None:
        for layer in self.layers:
            layer.counting = True
        with torch.no_grad():
            run()
        for layer, counted in zip(self.layers, self._counted(), strict=True):
            pairs = counted[: self.moe.num_experts]
            layer.fractions, layer.counting = (pairs / pairs.sum()).float(), False
            layer.reset()

    def metrics(self) -> ScalarMetrics:
        """Return metrics of the step: means over layers, equal on every rank. Collective over the world.

        moe/balance is the largest load of an expert over the mean load (1 is even), moe/aux_loss E * sum f_i P_i (1
        where even), both of layers whose scores choose the experts. moe/dropped is the share of pairs that no expert
        computed. With the engine's routing moe/routing_differs is the share of (token, layer) that the routers would
        have sent to another set of experts.
        """
        if not self.moe.num_experts:
            return {}
        e, counted = self.moe.num_experts, self._counted()
        choosing = [i for i, layer in enumerate(self.layers) if layer.chooses]
        pairs, probs = counted[choosing, :e], counted[choosing, e : 2 * e]
        tokens = pairs.sum(1, keepdim=True) / self.moe.top_k
        loss = balance_loss(probs / tokens, pairs / pairs.sum(1, keepdim=True))
        sums = torch.cat(
            [
                torch.stack([(pairs.amax(1) / pairs.mean(1)).sum(), loss.sum()]),
                counted[:, 2 * e :].sum(0),
                pairs.new_full((1,), len(choosing)),
            ]
        )
        if self.layout.pipeline > 1:
            dist.all_reduce(sums, group=self.layout.pgs.pp)
        balance, aux, routed, computed, replayed, differ, layers = sums.tolist()
        scalars = {"moe/dropped": 1 - computed / routed}
        if layers:
            scalars |= {"moe/balance": balance / layers, "moe/aux_loss": aux / layers}
        return scalars | ({"moe/routing_differs": differ / replayed} if replayed else {})

    def _counted(self) -> torch.Tensor:
        """Return float64 [layers, E + E + 4] over all ranks of the stage. Columns: pairs, sums of p, pairs routed,
        pairs computed, tokens with replayed experts, and those of them that are `rerouted`."""
        if not self.layers:  # a stage whose layers are all dense
            return torch.zeros(0, 2 * self.moe.num_experts + 4, dtype=torch.float64, device=self._device)
        counted = torch.stack([_row(layer) for layer in self.layers])
        dist.all_reduce(counted, group=self.layout.pgs.tp_dp_cp)
        return counted


def _row(layer: ExpertLayer) -> torch.Tensor:
    replays = layer.pairs.new_zeros(2) if layer.replays is None else layer.replays
    routed = layer.pairs.new_full((1,), layer.routed)
    return torch.cat([layer.pairs, layer.probs, routed, layer.computed.view(1), replays])
