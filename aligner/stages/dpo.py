"""Preference losses on pairs: DPO (Rafailov et al. 2023) and its relatives, one row of a table each.

pairs of the step -> logprobs by the reference, or stored -> losses of the pairs, NLL of the chosen -> optimizer step
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aligner.config.adapters import reference_rules
from aligner.config.rule import rules
from aligner.config.sections.preference import KEY, PreferenceConfig
from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.builders.comparisons import make_pairs
    from aligner.builders.data import make_batches, make_training_set
    from aligner.builders.job import Job
    from aligner.builders.models import make_preference_models
    from aligner.builders.reference_logprobs import store_reference
    from aligner.builders.runs import finish, make_run
    from aligner.config.schema import Config
    from aligner.data.batches import BatchSource
    from aligner.data.collate import collate_pairs
    from aligner.ops.reduce import sum_over
    from aligner.ops.rl.aggregate import aggregate, denominator
    from aligner.ops.rl.by_rank import with_partners
    from aligner.ops.rl.kl import kl_estimate
    from aligner.ops.rl.preference import (
        Labels,
        PairLogprobs,
        agreement,
        likelihood_weights,
        measure,
        pair_losses,
        rewards,
        start_losses,
        total,
    )
    from aligner.roles.policy import Policy, Reference, TokenOutputs
    from aligner.rollout.heldout import held_out_pairs
    from aligner.run.loop import Run
    from aligner.types import LabelTargets, LossOutput, ScalarMetrics, TrainBatch


def rows(cfg: Config) -> int:
    return 2


def other_models(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.preference.reference in ("model", "adapter") else ()


RULES = (  # also stage online_dpo's
    *reference_rules(f"{KEY}.reference"),
    *rules("""
!model.lora.rank algorithm.preference.reference=adapter => algorithm.preference.reference =model|stored|none
    | with model.lora.rank=0: there is no adapter to leave out
model.lora.rank => algorithm.preference.sync_every =0
    | with model.lora: the product of two mixed factors is no mixture of their products
algorithm.preference.sync_every memory.offload~weights => memory.offload
    | without weights with algorithm.preference.sync_every: checkpoints hold the reference, which has to be there
"""),
)

STAGE = Stage(
    reads=("preference", "comparisons"),
    answers=False,
    unit="sequences (pairs)",
    rows=rows,
    other_models=other_models,
    debug=("first_step_checks",),
    rules=RULES,
)


type Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (numerator, denominator)


def main(job: Job) -> None:
    cfg, preference = job.cfg, job.cfg.algorithm.preference
    train = make_training_set(job, partial(make_pairs, job))
    held_out = make_pairs(job, cfg.data.eval, "data.eval", cfg.data) if cfg.data.eval else None
    if preference.reference == "stored":
        store_reference(job, train, held_out, collate_pairs)
    batches = make_batches(job, train, collate_pairs)
    policy, reference, models = make_preference_models(job)
    evaluation = None
    if held_out is not None:
        logprobs = partial(job.timers, "logprobs")
        evaluation = partial(held_out_pairs, policy, reference, held_out, preference, cfg.eval.prompts, logprobs)
    run = make_run(job, models, {"data": batches.stream}, evaluation)
    checks = FirstStepChecks(cfg.debug.first_step_checks and preference.reference != "none")
    dpo(run, policy, reference, batches, preference, checks)
    finish(job, run, policy.model)


def dpo(
    run: Run,
    policy: Policy,
    reference: Reference | None,
    batches: BatchSource,
    cfg: PreferenceConfig,
    checks: FirstStepChecks,
) -> None:
    group = policy.model.layout.pgs.dp
    for step in run.steps():
        batch = batches.next()
        stats = learn(run, step, batch, policy, reference, cfg, checks)
        run.finish_batch(step, stats | batches.metrics(), batch, group.size())


def learn(
    run: Run,
    step: int,
    batch: TrainBatch,
    policy: Policy,
    reference: Reference | None,
    cfg: PreferenceConfig,
    checks: FirstStepChecks,
) -> ScalarMetrics:
    """Take one optimizer step on this rank's pairs, whatever their source."""
    group, fresh = policy.model.layout.pgs.dp, policy.model.step_count == 0
    if reference:
        with run.timers("logprobs"):
            if cfg.sync_every and step > 1 and (step - 1) % cfg.sync_every == 0:
                reference.follow(policy, cfg.sync_alpha)
            batch.of(LabelTargets).ref_logprobs = reference.logprobs(batch, batch.loss_mask, unit=2)
    if cfg.by_rank:
        with run.timers("logprobs"):
            logprobs = policy.logprobs(batch, batch.loss_mask, unit=2)
            batch.of(LabelTargets).labels = with_partners(batch, logprobs, cfg, group)
    with run.timers("update"):
        stats = policy.update(batch, dpo_loss(batch, cfg, group), unit=2)
    if fresh:
        checks.after_preference_update(stats, losses_at_start(batch, cfg, group), policy.model.dtype)
    return stats | {"dpo/loss": stats["policy/loss"]}


def dpo_loss(
    minibatch: TrainBatch, cfg: PreferenceConfig, group: dist.ProcessGroup
) -> Callable[[TokenOutputs, TrainBatch], LossOutput]:
    """Return the weighted losses of the pairs, averaged over all ranks' pairs, plus `nll_coef` times the negative
    log-likelihood of the chosen answers. Rows 2i are chosen, 2i + 1 rejected."""
    counts = Labels.of(minibatch.of(LabelTargets).labels, cfg).counts
    pairs = denominator(counts[:, None], "token_mean", group=group).clamp_min(1)
    chosen = denominator(minibatch.loss_mask[0::2] * counts[:, None], cfg.nll_aggregation, group=group)

    def loss(out: TokenOutputs, batch: TrainBatch) -> LossOutput:
        known = batch.of(LabelTargets)
        answers = measure(out.logprobs, known.ref_logprobs, batch.loss_mask, cfg.ld_alpha)
        labels = Labels.of(known.labels, cfg)
        losses = pair_losses(answers, labels, cfg)
        each = total(losses, cfg) * labels.weight * labels.counts
        if out.log_squares is not None:
            each = each * likelihood_weights(out.logprobs, out.log_squares, batch.loss_mask)
        loss_sum = each.sum() / pairs
        count = labels.counts.sum()
        means = {f"dpo/loss/{name}": ((x.detach() * labels.counts).sum(), count) for name, x in losses.items()}
        if cfg.nll_coef:
            mask = batch.loss_mask[0::2] * labels.counts[:, None]
            nll = aggregate(-out.logprobs[0::2], mask, cfg.nll_aggregation, chosen)
            loss_sum = loss_sum + cfg.nll_coef * nll
            means["dpo/nll"] = (-(out.logprobs[0::2].detach() * mask).sum(), mask.sum())
        if known.ref_logprobs is not None:
            mask = batch.loss_mask * labels.counts.repeat_interleave(2)[:, None]
            means["kl"] = ((kl_estimate(out.logprobs.detach(), known.ref_logprobs, "k2") * mask).sum(), mask.sum())
        return LossOutput(loss_sum, means | pair_metrics(answers, labels, batch, cfg))

    return loss


def pair_metrics(answers: PairLogprobs, labels: Labels, batch: TrainBatch, cfg: PreferenceConfig) -> Sums:
    """Return means over pairs, without gradient."""
    chosen, rejected = rewards(answers, labels, cfg)
    lengths, means = (answers.chosen_tokens, answers.rejected_tokens), (answers.chosen_mean, answers.rejected_mean)
    logps = means if cfg.over_mean(cfg.loss[0]) else (means[0] * lengths[0], means[1] * lengths[1])
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": agreement(chosen, rejected),
        "logps/chosen": logps[0].detach(),
        "logps/rejected": logps[1].detach(),
        "length/chosen": lengths[0],
        "length/rejected": lengths[1],
        "preference/equal_answers": (batch.tokens[0::2] == batch.tokens[1::2]).all(1).float(),
    }
    return {name: ((x * labels.counts).sum(), labels.counts.sum()) for name, x in values.items()}


def losses_at_start(batch: TrainBatch, cfg: PreferenceConfig, group: dist.ProcessGroup) -> dict[str, float]:
    """Return metric -> its mean over all ranks' pairs where policy and reference are equal."""
    labels = Labels.of(batch.of(LabelTargets).labels.double(), cfg)
    each = start_losses(labels, cfg)
    sums = torch.stack([(x * labels.counts).sum() for x in each.values()] + [labels.counts.sum()])
    *losses, count = sum_over(sums, group).tolist()
    return {f"dpo/loss/{name}": x / count for name, x in zip(each, losses, strict=True)} if count else {}
