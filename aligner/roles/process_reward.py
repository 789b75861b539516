"""The process reward model: the quality of each step of an answer, in training (stage rm) and as a `Reward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.data.steps import StepEncoder
from aligner.megatron.train import ShardedModel
from aligner.roles.batching import batch_metrics, forward_rows, micro_batches, no_rows
from aligner.types import LossOutput, Sample, ScalarMetrics, TrainBatch

StepsLoss = Callable[[Tensor, TrainBatch], LossOutput]  # (logits [B, T], micro-batch) -> share of the minibatch loss
OVER = {"min": lambda steps: steps.min(), "product": lambda steps: steps.prod()}


@dataclass
class ProcessRewardModel:
    """Model whose only output at the token that ends a step is the logit of the step being right."""

    main_thread: ClassVar[bool] = True  # its collectives may not run in a reward worker's thread
    middle: ClassVar[float] = 0.5

    model: ShardedModel
    batch: BatchConfig
    encoder: StepEncoder
    over: str = "min"  # of OVER: how an answer's score follows from its steps' probabilities
    name: str = "model"

    def _logits(self, output: Tensor, batch: TrainBatch) -> Tensor:
        """Convert output [N, 1] -> [B, T]."""
        return self.model.to_rows(output[:, 0].float(), batch.packing, shift=False)

    def logits(self, rows: TrainBatch) -> Tensor:
        """Return float32 [B, T] on the CPU of every rank: at the tokens in `loss_mask`, the rest may be 0."""
        return forward_rows(self.model, rows, self.batch, self._logits, wanted=rows.loss_mask > 0)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples by the `Reward` protocol: in [0, 1], 0 for an answer without steps. Collective like
        `RewardModel`."""
        scores = [0.0] * len(samples)
        rows, ends, places = [], [], []
        for i, sample in enumerate(samples):
            if steps := self.encoder.steps_of(sample.response):
                tokens, last = self.encoder.encode(steps)
                rows.append(torch.tensor([*sample.prompt.tokens, *tokens]))
                ends.append(torch.tensor(last) + len(sample.prompt.tokens))
                places.append(i)
        if not rows:
            self.logits(no_rows())
            return scores
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.zeros(tokens.shape)
        for row, last in zip(mask, ends, strict=True):
            row[last] = 1.0
        logits = self.logits(TrainBatch(tokens, torch.tensor([len(row) for row in rows]), mask))
        for i, row, last in zip(places, logits, ends, strict=True):
            scores[i] = float(OVER[self.over](row[last].double().sigmoid()))
        return scores

    def update(self, minibatch: TrainBatch, loss: StepsLoss) -> ScalarMetrics:
        """Take one optimizer step."""
        minibatch = replace(minibatch, wanted=minibatch.loss_mask > 0)
        parts = micro_batches(minibatch, self.batch, group=self.model.layout.pgs.dp)
        stats = self.model.step(parts, lambda output, batch: loss(self._logits(output, batch), batch))
        return {f"rm/{name}" if name in ("loss", "grad_norm", "lr") else name: v for name, v in stats.items()} | (
            batch_metrics(parts, self.batch, self.model.layout.context)
        )
