"""The loss of a model's indexers (`model.indexer.loss`): what it needs to know of a step, and its metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from aligner.megatron.expert_load import tokens_of
from aligner.megatron.groups import Layout
from aligner.megatron.latent import Indexer
from aligner.types import ScalarMetrics, TrainBatch


class IndexerLoss:
    """The indexers of this pipeline stage; without a loss nothing happens."""

    def __init__(self, module: torch.nn.Module, factor: float, layout: Layout):
        self.indexers = [each for each in module.modules() if isinstance(each, Indexer)]
        self.factor, self.layout, self._device = factor, layout, next(module.parameters()).device

    def begin(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Start a step. Collective over the data-parallel ranks."""
        tokens = tokens_of(micro_batches, self.layout) if self.factor else 0.0
        for indexer in self.indexers:
            indexer.tokens = tokens
            indexer.total.zero_()

    def metrics(self) -> ScalarMetrics:
        """Return indexer/loss, the mean divergence over tokens and layers, equal on every rank. Collective over the
        world."""
        if not self.factor:
            return {}
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for indexer in self.indexers:
            sums[0] += indexer.total
        dist.all_reduce(sums, group=self.layout.pgs.dp_cp)
        sums[1] = len(self.indexers)
        if self.layout.pipeline > 1:
            dist.all_reduce(sums, group=self.layout.pgs.pp)
        total, layers = sums.tolist()
        return {"indexer/loss": total / self.factor / layers}
