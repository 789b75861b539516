"""PTX (Ouyang et al. 2022): rows of a second stream whose likelihood is raised in the policy's own optimizer steps.

loss of a step = loss of the stage + coef * sum of -logprob / tokens, over the stream's rows of this step on all ranks
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from aligner.data.batches import BatchSource
from aligner.megatron.groups import Layout
from aligner.ops.packing.needed import predicting
from aligner.ops.rl.aggregate import aggregate, denominator
from aligner.types import LossOutput, PtxRows, ScalarMetrics, TrainBatch

LOSS = "ptx/loss"  # nats per token, without coef


@dataclass
class Ptx:
    batches: BatchSource
    coef: float
    layout: Layout
    _tokens: Tensor | None = None  # that are learned in this step, over all ranks

    def next(self) -> TrainBatch:
        """Return this rank's rows of the next step."""
        batch = self.batches.next()
        self._tokens = denominator(batch.loss_mask, "token_mean", group=self.layout.pgs.dp)
        return replace(batch.with_payloads(PtxRows()), wanted=predicting(batch.loss_mask))

    def loss(self, logprobs: Tensor, batch: TrainBatch) -> LossOutput:
        """Return the loss of a micro-batch; `logprobs` [B, T] at temperature 1, whatever the rollouts' is."""
        nll = aggregate(-logprobs, batch.loss_mask, "token_mean", self._tokens)
        means = {LOSS: (-(logprobs.detach() * batch.loss_mask).sum(), batch.loss_mask.sum())}
        return LossOutput(self.coef * nll, means)

    def with_stage_loss(self, stats: ScalarMetrics) -> ScalarMetrics:
        """Return the numbers of a step, with `loss` as the stage's own again."""
        return stats | {"loss": stats["loss"] - self.coef * stats[LOSS]}
