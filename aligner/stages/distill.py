"""Distillation: a student learns a teacher's distributions over the tokens of answers (Hinton et al. 2015).

rows of the step -> hidden states, or top logprobs, by the teacher -> divergence at each token -> optimizer step
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from aligner.algorithms.first_step import FirstStepChecks
from aligner.builders.answers import make_answer_evaluation
from aligner.builders.data import make_answers, make_batches, make_training_set
from aligner.builders.job import Job
from aligner.builders.runs import finish, make_run, saved_first
from aligner.builders.teachers import make_student_and_teacher
from aligner.config.sections.distill import KEY, DistillConfig
from aligner.data.batches import BatchSource
from aligner.data.collate import collate_sft
from aligner.ops.rl.aggregate import aggregate, denominator
from aligner.roles.teacher import Student, StudentOutputs, Teacher
from aligner.run.loop import Run
from aligner.types import LossOutput, TrainBatch


def main(job: Job) -> None:
    cfg = job.cfg
    batches = make_batches(job, make_training_set(job, partial(make_answers, job)), collate_sft)
    student, teacher = make_student_and_teacher(job)
    run = make_run(job, {"policy": student.model}, {"data": batches.stream}, make_answer_evaluation(job, student))
    same = job.contents[f"{KEY}.teacher"] == job.initial.content
    checks = FirstStepChecks(cfg.debug.first_step_checks and same)
    with saved_first(run):
        distill(run, student, teacher, batches, cfg.algorithm.distill, checks)
    finish(job, run, student.model)


def distill(
    run: Run,
    student: Student,
    teacher: Teacher,
    batches: BatchSource,
    cfg: DistillConfig,
    checks: FirstStepChecks,
) -> None:
    group = student.model.layout.pgs.dp
    for step in run.steps():
        batch, fresh = batches.next(), student.model.step_count == 0
        with run.timers("logprobs"):
            batch = teacher.tell(batch)
        with run.timers("update"):
            stats = student.update(batch, distill_loss(batch, cfg, group))
        if fresh:
            checks.after_distillation(stats, student.model.dtype)
        rows = len(batch.lengths) * group.size()
        run.finish(step, stats | batches.metrics(), tokens=float(batch.lengths.sum()) * group.size(), rows=rows)


def distill_loss(
    minibatch: TrainBatch, cfg: DistillConfig, group: dist.ProcessGroup
) -> Callable[[StudentOutputs, TrainBatch], LossOutput]:
    """The mean divergence over the masked tokens of the whole minibatch, and `sft_coef` times their mean negative
    log-likelihood."""
    tokens = denominator(minibatch.loss_mask, "token_mean", group=group)

    def loss(out: StudentOutputs, batch: TrainBatch) -> LossOutput:
        mask, count = batch.loss_mask, batch.loss_mask.sum()
        each = out.divergence
        if out.logprobs is not None:
            each = each - cfg.sft_coef * out.logprobs
        found = {
            "distill/loss": each,
            "distill/divergence": out.divergence,
            "distill/kl": out.kl,
            "distill/teacher_entropy": out.entropy,
            "distill/agreement": out.agreement,
        }
        found |= {"distill/nll": -out.logprobs} if out.logprobs is not None else {}
        found |= {"distill/top_k_mass": out.mass} if out.mass is not None else {}
        means = {name: ((x.detach() * mask).sum(), count) for name, x in found.items()}
        return LossOutput(aggregate(each, mask, "token_mean", tokens), means)

    return loss
