"""The critic: values of states, and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.megatron.train import ShardedModel
from aligner.ops.packing.documents import split_forks
from aligner.ops.packing.needed import predicting
from aligner.roles.batching import forward_rows, micro_batches
from aligner.types import LossOutput, RolloutBatch, ScalarMetrics, TrainBatch

ValueLoss = Callable[[Tensor, TrainBatch], LossOutput]  # (values [B,T], micro-batch) -> share of the minibatch loss


@dataclass
class Critic:
    """Value model: values = (head output - bias) / scale. A critic that starts from a reward model uses that model's
    centred, scaled scores from its first step."""

    model: ShardedModel
    batch: BatchConfig
    bias: float = 0.0
    scale: float = 1.0

    def _values(self, output: Tensor, batch: TrainBatch) -> Tensor:
        """Return values[:, t] = head(hidden[:, t-1]): the state BEFORE tokens[t]. output [N, 1] -> [B, T], index 0 is
        0."""
        return self.model.to_rows((output[:, 0].float() - self.bias) / self.scale, batch.packing, shift=True)

    def values(self, rows: RolloutBatch | TrainBatch, mask: Tensor | None = None) -> Tensor:
        """Return float32 [B, T] on the CPU of every rank: the value of the state before each token in `mask` [B, T],
        the rest may be 0; None: before every token."""
        if rows.forks is not None:
            parts = split_forks(rows, torch.ones(rows.tokens.shape) if mask is None else mask)
            return parts.whole.join(self.values(parts, parts.loss_mask))
        wanted = None if mask is None else predicting(mask)
        return forward_rows(self.model, rows, self.batch, self._values, wanted=wanted)

    def update(self, minibatch: TrainBatch, loss: ValueLoss) -> ScalarMetrics:
        # its own routers choose, or it is dense: the routing is that of the policy's weights
        minibatch = replace(minibatch, wanted=predicting(minibatch.loss_mask), routing=None)
        parts = micro_batches(minibatch, self.batch, group=self.model.layout.pgs.dp)

        def from_output(output: Tensor, batch: TrainBatch) -> LossOutput:
            values = self._values(output, batch)
            if batch.whole is None:
                return loss(values, batch)
            return loss(batch.whole.join(values), batch.whole.rows)

        stats = self.model.step(parts, from_output)
        # not the policy's
        own = ("loss", "grad_norm", "lr", "lora/b_norm", "indexer/loss", "moe/balance", "moe/aux_loss", "moe/dropped")
        return {f"critic/{name}" if name in own else name: v for name, v in stats.items()}
