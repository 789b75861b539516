"""Minibatches of the model's own answers, scored only where a teacher reads right ones: weights -> prompts -> answers
-> batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from aligner.data.formats import TeacherOf
from aligner.ops.reduce import reduce_metrics
from aligner.rollout.collate import collate
from aligner.rollout.requests import Requests
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.source import Weights
from aligner.types import ScalarMetrics, TeacherNumbers, TrainBatch

if TYPE_CHECKING:
    from aligner.data.teacher_prompts import TeacherPrompts
    from aligner.rollout.right_answers import RightAnswers


@dataclass
class OwnAnswers:
    """Minibatches of own answers. The same prompts and weights give the same answers on every layout and after a
    resume: seeds follow from step and row, as those of rollouts do."""

    weights: Weights
    requests: Requests
    generator: SampleGenerator
    ranks: dist.ProcessGroup  # data-parallel
    teacher_of: TeacherOf  # number of a prompt's teacher, by the prompt's columns
    teacher_prompts: TeacherPrompts | None = None  # None: teachers read the student's
    right_answers: RightAnswers | None = None  # None: teachers read no other answers

    def next(self, step: int) -> tuple[TrainBatch, ScalarMetrics]:
        """Return this rank's rows, their answers in the loss mask."""
        metrics = self.weights()
        self.requests.begin(step)
        early = self.right_answers.begin(step) if self.right_answers else None
        groups = self.generator(self.requests.take(range(self.requests.slots)), score=early)
        slots = torch.tensor(groups.slots).repeat_interleave(groups.size)
        rows = collate(groups.samples, groups.generations, slots, self.generator.tokenizer.pad_token_id)
        count = float(len(rows.lengths))
        means = {
            "response/tokens_mean": (float(rows.response_mask.sum()), count),
            "response/finished": (float(rows.finished.sum()), count),
        }
        minibatch = TrainBatch(rows.tokens, rows.lengths, loss_mask=rows.response_mask)
        numbers = [self.teacher_of(sample.prompt.fields, f"prompt {sample.prompt.id}") for sample in rows.samples]
        if None not in numbers:
            minibatch = minibatch.with_payloads(TeacherNumbers(torch.tensor(numbers)))
        prompts = [sample.prompt for sample in rows.samples]
        if self.right_answers is not None and self.teacher_prompts is not None:
            right, sums = self.right_answers(groups)
            minibatch = self.teacher_prompts.with_right_answers(prompts, minibatch, right, rows.rollout_logprobs)
            means |= sums | {"distill/taught": (float(minibatch.loss_mask.any(1).sum()), count)}
        elif self.teacher_prompts is not None:
            minibatch = minibatch.with_payloads(self.teacher_prompts.rows(prompts, minibatch, rows.rollout_logprobs))
        metrics |= reduce_metrics(means, {}, self.ranks) | self.requests.stream.metrics()
        return minibatch, metrics
