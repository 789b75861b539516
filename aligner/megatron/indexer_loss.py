"""The loss of a model's indexers (`model.indexer.loss`): what it needs to know of a step, and its metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.expert_load import tokens_of
from aligner.megatron.groups import Layout
from aligner.megatron.latent import Indexer
from aligner.types import ScalarMetrics, TrainBatch


class IndexerLoss:
    """The indexers of this pipeline stage; without a loss nothing happens."""

    def __init__(self, module: torch.nn.Module, cfg: ModelConfig, layout: Layout):
        self.indexers = [each for each in module.modules() if isinstance(each, Indexer)]
        self.factor, self.layers = cfg.indexer.loss, len(cfg.layers_of("indexer"))
        self.layout, self._device = layout, next(module.parameters()).device

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
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for indexer in self.indexers:
            total += indexer.total
        dist.all_reduce(total, group=self.layout.pgs.dp_cp)
        if self.layout.pipeline > 1:
            dist.all_reduce(total, group=self.layout.pgs.pp)
        return {"indexer/loss": float(total) / (self.factor * self.layers)}
