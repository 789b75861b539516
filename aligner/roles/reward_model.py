"""The reward model: scores of whole samples, in training (stage rm) and as a `Reward` of other stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.megatron.train import ShardedModel
from aligner.ops.packing.needed import last_tokens
from aligner.roles.batching import batch_metrics, forward_rows, micro_batches, no_rows
from aligner.types import LossOutput, RolloutBatch, Sample, ScalarMetrics, TrainBatch

ScoreLoss = Callable[[Tensor, TrainBatch], LossOutput]  # (scores [B,K], micro-batch) -> share of the minibatch loss


def last_token_scores(model: ShardedModel, output: Tensor, batch: TrainBatch) -> Tensor:
    """Return the head's output at the last non-padding token (EOS where the response ended). output [N, K] -> float32
    [B, K]."""
    rows = torch.arange(len(batch.lengths), device=output.device)
    return model.to_rows(output.float(), batch.packing, shift=False)[rows, batch.lengths - 1]


class AttributeWeight(NamedTuple):
    """Share of an output in a score."""

    output: int
    weight: float
    bias: float
    scale: float


@dataclass
class RewardModel:
    """Model of whole samples' scores. `bias` is the mean score on the training set: scores are returned centred.
    `scale` divides them (1 = none)."""

    main_thread: ClassVar[bool] = True  # its collectives may not run in a reward worker's thread
    middle: ClassVar[float] = 0.0  # scores above it are in favour of an answer

    model: ShardedModel
    batch: BatchConfig
    bias: float = 0.0
    scale: float = 1.0
    name: str = "model"
    mix: tuple[AttributeWeight, ...] = ()  # of a model of several attributes; empty: only the first output

    def raw_scores(self, rows: RolloutBatch | TrainBatch) -> Tensor:
        """Return float32 [B, K] on the CPU of every rank, neither centred nor scaled."""
        return forward_rows(
            self.model,
            rows,
            self.batch,
            lambda out, b: last_token_scores(self.model, out, b),
            columns=self.model.head.outputs,
            wanted=last_tokens(rows.lengths, rows.tokens.shape[1]),
        )

    def scores(self, rows: RolloutBatch | TrainBatch) -> Tensor:
        """Return float32 [B]: the first output, or the weighted sum of several, each centred and scaled."""
        raw = self.raw_scores(rows)
        if not self.mix:
            return (raw[:, 0] - self.bias) / self.scale
        return sum(one.weight * (raw[:, one.output] - one.bias) / one.scale for one in self.mix)  # type: ignore

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples by the `Reward` protocol. Collective over the model's tensor and pipeline ranks: all pass the
        same samples. If the model `exchanges`, it is collective over all ranks: others pass their own, or none."""
        if not samples:
            self.scores(no_rows())
            return []
        sequences = [torch.tensor(s.prompt.tokens + s.tokens) for s in samples]
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths = torch.tensor([len(s) for s in sequences])
        return self.scores(TrainBatch(tokens, lengths, torch.zeros(len(samples), 0))).tolist()

    def update(self, minibatch: TrainBatch, loss: ScoreLoss, unit: int) -> ScalarMetrics:
        """Take one optimizer step; `unit` consecutive rows (2: the pair) stay in one micro-batch."""
        minibatch = replace(minibatch, wanted=last_tokens(minibatch.lengths, minibatch.tokens.shape[1]))
        parts = micro_batches(minibatch, self.batch, unit, self.model.layout.pgs.dp)
        stats = self.model.step(
            parts,
            lambda output, batch: loss(last_token_scores(self.model, output, batch), batch),
        )
        return {f"rm/{name}" if name in ("loss", "grad_norm", "lr") else name: v for name, v in stats.items()} | (
            batch_metrics(parts, self.batch, self.model.layout.context)
        )
