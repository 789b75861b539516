"""KTO (Ethayarajh et al. 2024): single answers that are desirable or not.

answers of the step -> logprobs by the reference, or stored -> z0 of all ranks' mismatched answers -> losses of the
answers -> optimizer step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from aligner.config.adapters import reference_rules
from aligner.config.rule import rules
from aligner.config.sections.kto import KEY, KtoConfig
from aligner.config.stage import Stage
from aligner.errors import DataError

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import numpy as np
    import torch
    import torch.distributed as dist

    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.builders.comparisons import make_unpaired
    from aligner.builders.data import make_batches, make_training_set
    from aligner.builders.job import Job
    from aligner.builders.models import make_policy, make_reference
    from aligner.builders.reference_logprobs import store_reference
    from aligner.builders.runs import finish, make_run
    from aligner.config.schema import Config
    from aligner.data.batches import BatchSource
    from aligner.data.collate import collate_unpaired
    from aligner.data.mixture import Mixture
    from aligner.data.unpaired import UnpairedDataset, with_mismatched
    from aligner.ops.reduce import sum_over
    from aligner.ops.rl.kto import log_ratios, sample_losses
    from aligner.roles.policy import Policy, Reference, TokenOutputs
    from aligner.rollout.heldout import held_out_answers
    from aligner.rollout.unpaired import with_reference, zero_point
    from aligner.run.loop import Run
    from aligner.types import LabelTargets, LossOutput, TrainBatch


def other_models(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.kto.second_model else ()


def passes(cfg: Config) -> dict[str, float]:
    """Return the passes of each model. The policy reads the mismatched answers, the reference also the rows
    themselves unless they are stored."""
    kto = cfg.algorithm.kto
    mismatched = float(kto.kl == "minibatch")
    return {"policy": mismatched, "reference": mismatched + (kto.reference == "model")}


RULES = (
    *reference_rules(f"{KEY}.reference", "stored"),
    *rules("""
algorithm.kto.kl=minibatch => batch.sequences >=2
    | with algorithm.kto.kl=minibatch, better 16 and more: one sample has no mismatched answer
"""),
)

STAGE = Stage(
    reads=("kto", "comparisons"),
    answers=False,
    other_models=other_models,
    passes=passes,
    debug=("first_step_checks",),
    rules=RULES,
)


BALANCED = (1.0, 4 / 3)  # desirable over undesirable, of weight times number: the paper's equation 8


def main(job: Job) -> None:
    cfg, kto_cfg = job.cfg, job.cfg.algorithm.kto
    train = make_training_set(job, partial(make_unpaired, job))
    held_out = make_unpaired(job, cfg.data.eval, "data.eval", cfg.data) if cfg.data.eval else None
    job.say(describe_labels(train, kto_cfg, cfg.data.weight_by == "tokens"))
    if held_out is not None:
        first = held_out.desirable[: cfg.eval.prompts or None]
        what = f"the first {len(first)} rows (eval.prompts={cfg.eval.prompts}) of data.eval={cfg.data.eval}"
        _both_labels(float(first.mean()), what, "answers of the two labels could not be compared")
    if kto_cfg.reference == "stored":
        store_reference(job, train, held_out, collate_unpaired)
    arrange = partial(with_mismatched, limit=cfg.data.max_tokens) if kto_cfg.kl == "minibatch" else None
    batches = replace(make_batches(job, train, collate_unpaired), arrange=arrange)
    policy = make_policy(job, cfg.run.steps, entropy=False)
    reference, evaluation = make_reference(job, policy) if kto_cfg.second_model else None, None
    if held_out is not None:
        logprobs = partial(job.timers, "logprobs")
        evaluation = partial(
            held_out_answers, policy, reference, held_out, kto_cfg, arrange, cfg.eval.prompts, logprobs
        )
    run = make_run(job, {"policy": policy.model}, {"data": batches.stream}, evaluation)
    kto(run, policy, reference, batches, kto_cfg, FirstStepChecks(cfg.debug.first_step_checks))
    finish(job, run, policy.model)


def describe_labels(train: UnpairedDataset | Mixture, cfg: KtoConfig, by_tokens: bool = False) -> str:
    """Return a line for the log with the shares of labels and their weights; `by_tokens`: weights of sources are of
    their tokens. Raises DataError if there is only one label."""
    parts = list(train.parts.values()) if isinstance(train, Mixture) else [train]
    weights = np.asarray(train.weights if isinstance(train, Mixture) else [1.0])
    if by_tokens:
        weights = weights / [source.lengths.mean() for source in parts]
    share = float(np.average([source.desirable.mean() for source in parts], weights=weights))
    why = "nothing would hold the policy back from giving all answers the same"
    _both_labels(share, ", ".join(source.report.key for source in parts), why)
    ratio = cfg.desirable_weight * share / (cfg.undesirable_weight * (1 - share))
    low, high = BALANCED
    text = f"{share:.3g} of the answers are desirable; weighted, they count {ratio:.3g} times as much as the others"
    if ratio * (1 + 1e-9) < low:
        better = f"desirable_weight={cfg.desirable_weight / ratio * low:.3g}"
    elif ratio > high * (1 + 1e-9):
        better = f"undesirable_weight={cfg.undesirable_weight * ratio / high:.3g}"
    else:
        return text
    return f"WARNING: {text}: KTO is meant for 1 to 1.33 times ({KEY}.{better} would do)"


def _both_labels(share: float, what: str, why: str) -> None:
    if share in (0.0, 1.0):
        raise DataError(
            f"{what}: expected answers with label true and answers with label false, but all are "
            f"{str(share == 1).lower()}: {why}"
        )


def kto(
    run: Run,
    policy: Policy,
    reference: Reference | None,
    batches: BatchSource,
    cfg: KtoConfig,
    checks: FirstStepChecks,
) -> None:
    group = policy.model.layout.pgs.dp
    for step in run.steps():
        rows, fresh = batches.next(), policy.model.step_count == 0
        with run.timers("logprobs"):
            batch, mismatched = with_reference(rows, reference)
            z0 = zero_point(policy, mismatched) if cfg.kl == "minibatch" else 0.0
        with run.timers("update"):
            stats = policy.update(batch, kto_loss(batch, z0, cfg, group))
        if fresh:
            checks.after_preference_update(stats, losses_at_start(batch, cfg, group), policy.model.dtype)
        stats["kto/loss"], stats["kl"] = stats["policy/loss"], z0
        stats["rewards/margins"] = stats["rewards/chosen"] - stats["rewards/rejected"]
        if cfg.kl == "minibatch":
            stats["kto/unmatched"] = float(not len(mismatched.lengths))  # all samples or none
        run.finish_batch(step, stats | batches.metrics(), batch, group.size())


def kto_loss(
    minibatch: TrainBatch, z0: float, cfg: KtoConfig, group: dist.ProcessGroup
) -> Callable[[TokenOutputs, TrainBatch], LossOutput]:
    """Return the losses of the answers, averaged over all ranks' answers; weights are not in the denominator."""
    answers = len(minibatch.lengths) * group.size()

    def loss(out: TokenOutputs, batch: TrainBatch) -> LossOutput:
        known = batch.of(LabelTargets)
        desirable = known.labels[:, 0]
        ratios = log_ratios(out.logprobs, known.ref_logprobs, batch.loss_mask)
        each = sample_losses(ratios, desirable, z0, cfg)
        values = {
            "kto/loss": each.detach(),
            "rewards": cfg.beta * ratios.detach(),
            "logps": (out.logprobs.detach() * batch.loss_mask).sum(1),
            "length": batch.loss_mask.sum(1),
        }
        count = torch.full((), float(len(desirable)), device=desirable.device)
        means = {"kto/desirable": (desirable.sum(), count)}
        for side, mask in (("chosen", desirable), ("rejected", 1 - desirable)):
            means |= {f"{name}/{side}": ((x * mask).sum(), mask.sum()) for name, x in values.items()}
        return LossOutput(each.sum() / answers, means)

    return loss


def losses_at_start(batch: TrainBatch, cfg: KtoConfig, group: dist.ProcessGroup) -> dict[str, float]:
    """Return metric -> its value where policy and reference are equal; not of a label that no rank's rows have."""
    labels = batch.of(LabelTargets).labels
    count = float(sum_over(labels[:, 0].double().sum(), group)), len(labels) * group.size()
    losses = {}
    if count[0]:
        losses["kto/loss/chosen"] = cfg.desirable_weight / 2
    if count[0] < count[1]:
        losses["kto/loss/rejected"] = cfg.undesirable_weight / 2
    return losses
