"""Reward model: a scalar head that ranks the chosen answer of a pair above the rejected one (or predicts attributes).

pairs of the step -> scores at the last tokens -> Bradley-Terry loss -> optimizer step; at the end: mean score -> bias
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from aligner.algorithms.first_step import FirstStepChecks, zero_head_loss
    from aligner.builders.comparisons import make_rated, make_steps
    from aligner.builders.data import in_shares, make_batches, make_training_set
    from aligner.builders.job import Job
    from aligner.builders.models import make_scorer, make_step_scorer
    from aligner.builders.runs import finish, make_run
    from aligner.config.schema import Config
    from aligner.data.batches import BatchSource
    from aligner.data.collate import collate_preference, collate_scored, collate_steps
    from aligner.data.mixture import Mixture
    from aligner.ops.rl.aggregate import aggregate, denominator
    from aligner.ops.rl.reward_loss import bradley_terry, regression, rightly, steps
    from aligner.roles.reward_model import RewardModel
    from aligner.rollout.heldout import STATISTICS_ROWS, pair_accuracy, score_statistics, step_accuracy
    from aligner.run.loop import Run
    from aligner.types import LabelTargets, LossOutput, StepTargets, TrainBatch


def rows(cfg: Config) -> int:
    return 2 if cfg.algorithm.reward_loss.kind == "bradley_terry" else 1


STAGE = Stage(
    reads=("reward_loss",),
    scores=True,
    answers=False,
    unit="sequences (pairs)",
    rows=rows,
    debug=("first_step_checks",),
)


def main(job: Job) -> None:
    if job.cfg.algorithm.reward_loss.kind == "process":
        return process(job)
    cfg, loss = job.cfg, job.cfg.algorithm.reward_loss
    pairwise = loss.kind == "bradley_terry"
    train = make_training_set(job, partial(make_rated, job))
    batches = make_batches(job, train, collate_preference if pairwise else collate_scored)
    model, evaluation = make_scorer(job, 1 if pairwise else len(loss.attributes)), None
    if cfg.data.eval:
        held_out = make_rated(job, cfg.data.eval, "data.eval", cfg.data)
        evaluation = partial(pair_accuracy, model, held_out, cfg.eval.prompts, pairwise)
    run = make_run(job, {"model": model.model}, {"data": batches.stream}, evaluation)
    # a head that model.init lacks starts at zero where there is a Hugging Face folder, at random elsewhere
    zero_head = job.initial.folder is not None and not job.initial.has_scores
    rm(run, model, batches, cfg.algorithm, FirstStepChecks(cfg.debug.first_step_checks and zero_head))
    rows = train if not isinstance(train, Mixture) else in_shares(job, train, STATISTICS_ROWS)
    each = score_statistics(model, rows, pairwise)
    (bias, std), attributes = each[0], list(loss.attributes)
    job.say(f"mean score on the training set {bias:.4g} (stored as bias), std {std:.4g}")
    extra = {"bias": bias, "std": std, "attributes": attributes}
    if not pairwise:
        extra |= {"biases": [mean for mean, _ in each], "stds": [std for _, std in each]}
    finish(job, run, model.model, extra)


def process(job: Job) -> None:
    """Train a head that predicts for each step of an answer whether it is right (Lightman et al. 2023)."""
    cfg, loss = job.cfg, job.cfg.algorithm.reward_loss
    batches = make_batches(job, make_training_set(job, partial(make_steps, job)), collate_steps)
    model, evaluation = make_step_scorer(job), None
    if cfg.data.eval:
        held_out = make_steps(job, cfg.data.eval, "data.eval", cfg.data)
        evaluation = partial(step_accuracy, model, held_out, cfg.eval.prompts)
    run = make_run(job, {"model": model.model}, {"data": batches.stream}, evaluation)
    group = model.model.layout.pgs.dp
    for step in run.steps():
        batch = batches.next()
        with run.timers("update"):
            stats = model.update(batch, steps_loss(batch, group))
        run.finish_batch(step, stats | batches.metrics(), batch, group.size())
    finish(job, run, model.model, {"separator": loss.separator})


def steps_loss(minibatch: TrainBatch, group: dist.ProcessGroup) -> Callable[[Tensor, TrainBatch], LossOutput]:
    """Return the cross-entropy of the labelled steps: their sum over the minibatch on all ranks, divided by their
    number."""
    total = denominator(minibatch.loss_mask, "token_mean", group=group)

    def loss(logits: Tensor, batch: TrainBatch) -> LossOutput:
        mask, count, labels = batch.loss_mask, batch.loss_mask.sum(), batch.of(StepTargets).step_labels
        right = (rightly(logits.detach(), labels) * mask).sum(), count
        likely = (logits.detach().sigmoid() * mask).sum(), count
        value = aggregate(steps(logits, labels), mask, "token_mean", total)
        return LossOutput(value, {"rm/accuracy": right, "rm/probability": likely})

    return loss


def rm(run: Run, model: RewardModel, batches: BatchSource, cfg: AlgorithmConfig, checks: FirstStepChecks) -> None:
    group = model.model.layout.pgs.dp
    pairwise = cfg.reward_loss.kind == "bradley_terry"
    unit = 2 if pairwise else 1
    for step in run.steps():
        batch = batches.next()
        count = len(batch.lengths) // unit
        loss = preference_loss(count, cfg, group) if pairwise else attribute_loss(count, group)
        with run.timers("update"):
            stats = model.update(batch, loss, unit)
        if pairwise:
            checks.after_reward_update(stats, zero_head_loss(batch, cfg.reward_loss.margin, group))
        run.finish_batch(step, stats | batches.metrics(), batch, group.size())


def preference_loss(
    pairs: int, cfg: AlgorithmConfig, group: dist.ProcessGroup
) -> Callable[[Tensor, TrainBatch], LossOutput]:
    """Return Bradley-Terry over this rank's `pairs` (rows 2i chosen, 2i+1 rejected), averaged over all ranks' pairs."""
    total = pairs * group.size()
    rm = cfg.reward_loss

    def loss(scores: Tensor, batch: TrainBatch) -> LossOutput:
        chosen, rejected = scores[0::2, 0], scores[1::2, 0]
        margin = batch.of(LabelTargets).labels[0::2] if rm.margin else None
        per_pair, stats = bradley_terry(chosen, rejected, margin, rm.center_coef)
        count = torch.full((), float(len(chosen)), device=scores.device)  # not from the host: that would wait
        return LossOutput(per_pair.sum() / total, {f"rm/{name}": (x.sum(), count) for name, x in stats.items()})

    return loss


def attribute_loss(samples: int, group: dist.ProcessGroup) -> Callable[[Tensor, TrainBatch], LossOutput]:
    """Return the squared error of the attribute scores, averaged over the samples of all ranks."""
    total = samples * group.size()

    def loss(scores: Tensor, batch: TrainBatch) -> LossOutput:
        per_sample = regression(scores, batch.of(LabelTargets).labels)
        count = torch.full((), float(len(per_sample)), device=scores.device)
        return LossOutput(per_sample.sum() / total, {"rm/mse": (per_sample.detach().sum(), count)})

    return loss
