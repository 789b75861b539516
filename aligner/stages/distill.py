"""Distillation: a student learns a teacher's distributions over the tokens of answers (Hinton et al. 2015).

rows of the step, or the student's answers to their prompts -> hidden states or top logprobs by the teacher
-> divergence at each token -> optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aligner.config.checks import exists
from aligner.config.rule import rules
from aligner.config.sections.distill import KEY, DistillConfig
from aligner.config.stage import Stage
from aligner.errors import ConfigError

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch.distributed as dist
    from torch import Tensor

    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.builders.answers import make_answer_evaluation
    from aligner.builders.data import make_answers, make_batches, make_prompts, make_training_set, settle_steps
    from aligner.builders.engines import make_refit
    from aligner.builders.job import Job
    from aligner.builders.own_answers import make_own_answers
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.builders.stored_targets import store_targets
    from aligner.builders.teachers import make_models
    from aligner.config.schema import Config
    from aligner.data.batches import BatchSource
    from aligner.data.collate import collate_sft
    from aligner.ops.rl.aggregate import aggregate, denominator
    from aligner.ops.rl.spans import last_of_spans
    from aligner.roles.teacher import Student, StudentOutputs, Teacher, add_targets
    from aligner.rollout.own_answers import OwnAnswers
    from aligner.run.loop import Run
    from aligner.types import LossOutput, TextSpans, TrainBatch


def other_models(cfg: Config) -> tuple[str, ...]:
    return () if cfg.algorithm.distill.store or cfg.algorithm.distill.own_teacher else ("teacher",)


RULES = rules("""
!algorithm.distill.teachers !algorithm.distill.teacher !algorithm.distill.store => algorithm.distill.teacher
    | a folder with the model to learn from, for stage distill
algorithm.distill.on_policy => sampling.temperature >0
    | with algorithm.distill.on_policy: answers to learn from are sampled
algorithm.distill.of_group => batch.group >=2
    | with right_answer in algorithm.distill.teacher_prompt: it is another one to the same prompt
!algorithm.distill.of_group => batch.group =1
    | without right_answer in algorithm.distill.teacher_prompt: other answers to the prompt have no use
algorithm.distill.of_group !reward.functions => reward.functions
    | a function that gives right answers eval.full_score, with right_answer in algorithm.distill.teacher_prompt
algorithm.distill.teachers data.formats~text => data.format
    | rows with answers, with algorithm.distill.teachers: documents continue from row to row
""")


def check(cfg: Config) -> None:
    teachers, store = cfg.algorithm.distill.models(), cfg.algorithm.distill.store
    for name, path in teachers.items():
        if not path:
            raise ConfigError(f"{KEY}.{name}", path, "a folder with the model to learn from")
        exists(f"{KEY}.{name}", path)
    if store and not teachers:
        exists(f"{KEY}.store", store)


def passes(cfg: Config) -> dict[str, float]:
    """Return the passes of each model, and the share of steps that generate. Each of several teachers reads an equal
    share of the rows."""
    distill = cfg.algorithm.distill
    teacher = "policy" if distill.own_teacher else "teacher"
    return {teacher: 1.0, "teachers": 1 / max(1, len(distill.teachers)), "generate": distill.on_policy}


def generates(cfg: Config) -> bool:
    return cfg.algorithm.distill.on_policy > 0


STAGE = Stage(
    reads=("distill", "generation", "likelihood"),
    generates=generates,
    other_models=other_models,
    passes=passes,
    debug=("first_step_checks",),
    rules=RULES,
    check=check,
)


def main(job: Job) -> None:
    cfg, batches, answers, refit = job.cfg, None, None, None
    own, state, train, prompts, stored = cfg.algorithm.distill, {}, None, None, 0
    if own.on_policy < 1:
        train = make_training_set(job, partial(make_answers, job, teacher_of=own.teacher_of))
    if own.on_policy:
        prompts = make_training_set(
            job, partial(make_prompts, job, teacher_of=own.teacher_of, teacher_prompt=own.teacher_prompt)
        )
    if own.store:
        train, stored = store_targets(job, train)
    if train is None:
        settle_steps(job, prompts, "sequences", cfg.batch.group)
    else:
        batches = make_batches(job, train, collate_sft)
        state["data"] = batches.stream
    if own.store and not cfg.run.steps:  # only the files were needed
        return
    student, teachers = make_models(job, stored)
    if own.on_policy:
        refit = make_refit(job, student.model)
        answers, answer_state = make_own_answers(job, student, refit, prompts, cfg.batch.sequences, teachers)
        state |= answer_state
    run = make_run(job, {"policy": student.model}, state, make_answer_evaluation(job, student, refit))
    known = {job.built.contents[f"{KEY}.{name}"] for name in own.models()} if teachers else set()
    same = known == {job.initial.content}
    # its own k tokens are more to learn, and so is what a prompt of its own says
    nothing_to_learn = same and own.outside != "zero" and not own.teacher_prompt
    checks = FirstStepChecks(cfg.debug.first_step_checks and nothing_to_learn)
    with saved_first(run):
        distill(run, student, teachers, batches, answers, own, checks)
    finish(job, run, student.model)


def distill(
    run: Run,
    student: Student,
    teachers: Sequence[Teacher],
    batches: BatchSource | None,
    answers: OwnAnswers | None,
    cfg: DistillConfig,
    checks: FirstStepChecks,
) -> None:
    group = student.model.layout.pgs.dp
    for step in run.steps():
        fresh, own = student.model.step_count == 0, cfg.generates(step)
        batch, metrics = answers.next(step) if own else (batches.next(), batches.metrics())
        if teachers:
            with run.timers("logprobs"):
                batch = add_targets(teachers, batch)
        with run.timers("update"):
            stats = student.update(batch, distill_loss(batch, cfg, group))
        if fresh:
            checks.after_distillation(stats, student.model.dtype)
        metrics |= stats | {"distill/on_policy": float(own)}
        run.finish_batch(step, metrics, batch, group.size())


def distill_loss(
    minibatch: TrainBatch, cfg: DistillConfig, group: dist.ProcessGroup
) -> Callable[[StudentOutputs, TrainBatch], LossOutput]:
    """Return the mean divergence over the masked tokens of the whole minibatch, or its spans of text, plus `sft_coef`
    times their mean negative log-likelihood."""
    tokens = denominator(compared(minibatch), "token_mean", group=group)

    def loss(out: StudentOutputs, batch: TrainBatch) -> LossOutput:
        mask = compared(batch)
        count = mask.sum()
        each = out.divergence
        if out.logprobs is not None:
            each = each - cfg.sft_coef * out.logprobs
        values = {
            "distill/loss": each,
            "distill/divergence": out.divergence,
            "distill/kl": out.kl,
            "distill/teacher_entropy": out.entropy,
            "distill/agreement": out.agreement,
            "distill/nll": None if out.logprobs is None else -out.logprobs,
            "distill/top_k_mass": out.mass,
        }
        means = {name: ((x.detach() * mask).sum(), count) for name, x in values.items() if x is not None}
        if (text := batch.find(TextSpans)) is not None:
            aligned, every = (text.spans > 0).sum(), batch.loss_mask.sum()
            means |= {"distill/span_tokens": (aligned, count), "distill/unaligned_fraction": (every - aligned, every)}
        return LossOutput(aggregate(each, mask, "token_mean", tokens), means)

    return loss


def compared(batch: TrainBatch) -> Tensor:
    """Return float32 [B, T]: 1 at the tokens whose divergence counts, the last ones of spans if texts are compared."""
    text = batch.find(TextSpans)
    return batch.loss_mask if text is None else last_of_spans(text.spans).float()
