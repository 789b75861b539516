"""Held-out numbers of the supervised stages, over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from aligner.config.sections.kto import KtoConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.data.collate import (
    collate_pairs,
    collate_preference,
    collate_scored,
    collate_sft,
    collate_steps,
    collate_unpaired,
)
from aligner.data.dataset import PairDataset
from aligner.data.items import SftItem, UnpairedItem
from aligner.data.unpaired import UnpairedDataset
from aligner.errors import ConfigError
from aligner.ops.packing.documents import split_documents
from aligner.ops.reduce import reduce_metrics, sum_over
from aligner.ops.rl.by_rank import with_partners
from aligner.ops.rl.kto import above, log_ratios, sample_losses
from aligner.ops.rl.preference import Labels, agreement, measure, pair_losses, rewards, total
from aligner.ops.rl.reward_loss import bradley_terry, regression, rightly, steps
from aligner.roles.policy import Policy, Reference
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.sharing import share
from aligner.rollout.unpaired import with_reference, zero_point
from aligner.types import LabelTargets, ScalarMetrics, StepTargets, TrainBatch

STATISTICS_ROWS = 2048  # rows (pairs) of the training set that fix a reward model's bias


def _own_rows(model, dataset: Sequence, limit: int) -> list:
    """Return this data-parallel rank's share of the first `limit` rows (0: all)."""
    return [dataset[i] for i in _own_indices(model, dataset, limit)]


def _own_indices(model, dataset: Sequence, limit: int) -> range:
    count = min(limit, len(dataset)) if limit else len(dataset)
    layout = model.layout
    if model.exchanges and count < layout.data:
        raise ConfigError("parallel.expert", layout.expert, f"1 with {count} rows for {layout.data} ranks")
    return range(count)[share(count, layout.data, layout.dp_rank)]


def _none_or(items: list, batch: TrainBatch) -> TrainBatch:
    """Return `batch`, or its columns without rows where there are more ranks than rows and so no `items`."""
    return batch if items else batch.select(torch.zeros(0, dtype=torch.int64))


def held_out_loss(policy: Policy, dataset: Sequence[SftItem], limit: int) -> ScalarMetrics:
    """Return eval/loss: mean negative log-likelihood per loss-carrying token, nats."""
    items = _own_rows(policy.model, dataset, limit)
    total, count = 0.0, 0.0
    if items:
        batch = split_documents(collate_sft(items, 0))
        total = -float((policy.logprobs(batch, batch.loss_mask) * batch.loss_mask).sum())
        count = float(batch.loss_mask.sum())
    return reduce_metrics({"eval/loss": (total, count)}, {}, policy.model.layout.pgs.dp)


def pair_accuracy(model: RewardModel, dataset: Sequence, limit: int, pairwise: bool) -> ScalarMetrics:
    """Return eval/accuracy (chosen above rejected; a tie is half right), eval/loss (no centre term) and eval/margin;
    for regression eval/loss."""
    items = _own_rows(model.model, dataset, limit)
    batch = (collate_preference if pairwise else collate_scored)(items, 0) if items else None
    scores = model.raw_scores(batch) if batch is not None else torch.zeros(0, 1)
    if not pairwise:
        loss = regression(scores, batch.of(LabelTargets).labels) if batch is not None else torch.zeros(0)
        return reduce_metrics({"eval/loss": (float(loss.sum()), len(loss))}, {}, model.model.layout.pgs.dp)
    loss, stats = bradley_terry(scores[0::2, 0], scores[1::2, 0], None, 0.0)
    n = float(len(loss))
    means = {"eval/loss": (float(loss.sum()), n)}
    means |= {f"eval/{name}": (float(stats[name].sum()), n) for name in ("accuracy", "margin")}
    return reduce_metrics(means, {}, model.model.layout.pgs.dp)


def step_accuracy(model: ProcessRewardModel, dataset: Sequence, limit: int) -> ScalarMetrics:
    """Return eval/loss and eval/accuracy (of the labelled steps: the likelier side is the right one) per step."""
    items = _own_rows(model.model, dataset, limit)
    loss, right, count = 0.0, 0.0, 0.0
    if items:
        batch = collate_steps(items, 0)
        logits, on, known = model.logits(batch), batch.loss_mask.bool(), batch.of(StepTargets).step_labels
        loss, count = float(steps(logits, known)[on].sum()), float(on.sum())
        right = float(rightly(logits, known)[on].sum())
    means = {"eval/loss": (loss, count), "eval/accuracy": (right, count)}
    return reduce_metrics(means, {}, model.model.layout.pgs.dp)


def held_out_pairs(
    policy: Policy,
    reference: Reference | None,
    dataset: PairDataset,
    cfg: PreferenceConfig,
    limit: int,
    reading: Callable[[], AbstractContextManager],
) -> ScalarMetrics:
    """Return eval/accuracy (the chosen answer has the larger reward; a tie is half right), eval/margin (of the
    rewards) and eval/loss (no NLL, no weights of rows; losses that sort do it with these pairs). The models are read
    within `reading`. Without `reference` the rows have its logprobs, or there are none."""
    items, group = _own_rows(policy.model, dataset, limit), policy.model.layout.pgs.dp
    batch = _none_or(items, collate_pairs(items or [dataset[0]], 0))
    known = batch.of(LabelTargets)
    with reading():
        own = policy.logprobs(batch, batch.loss_mask, unit=2)
        if reference:
            known.ref_logprobs = reference.logprobs(batch, batch.loss_mask, unit=2)
    if cfg.by_rank:
        known.labels = with_partners(batch, own, cfg, group)
    answers, labels = measure(own, known.ref_logprobs, batch.loss_mask, cfg.ld_alpha), Labels.of(known.labels, cfg)
    chosen, rejected = rewards(answers, labels, cfg)
    names = ("accuracy", "margin", "loss")
    columns = [agreement(chosen, rejected), chosen - rejected, total(pair_losses(answers, labels, cfg), cfg)]
    means = {f"eval/{name}": (float(x.sum()), float(len(x))) for name, x in zip(names, columns, strict=True)}
    return reduce_metrics(means, {}, group)


def held_out_answers(
    policy: Policy,
    reference: Reference | None,
    dataset: UnpairedDataset,
    cfg: KtoConfig,
    arrange: Callable[[list[UnpairedItem], Sequence[int]], list[UnpairedItem]] | None,
    limit: int,
    reading: Callable[[], AbstractContextManager],
) -> ScalarMetrics:
    """Return the metrics of held-out labelled answers. `arrange` gives the rows their mismatched answers.

    eval/accuracy: of all couples of a desirable answer and another, the first has the larger reward; a tie is half
    right. eval/margin: mean reward of the desirable answers less that of the others. eval/loss and eval/kl (z0): of
    these rows.
    """
    indices, group = _own_indices(policy.model, dataset, limit), policy.model.layout.pgs.dp
    count = min(limit or len(dataset), len(dataset))
    items = arrange([dataset[i] for i in range(count)], indices) if arrange else [dataset[i] for i in indices]
    batch = _none_or(items, collate_unpaired(items or [dataset[0]], 0))
    with reading():
        answers, mismatched = with_reference(batch, reference)
        z0 = zero_point(policy, mismatched) if arrange else 0.0
        own = policy.logprobs(answers, answers.loss_mask)
    everyone = torch.zeros(2, count, dtype=torch.float64)
    known = answers.of(LabelTargets)
    everyone[0, indices] = log_ratios(own, known.ref_logprobs, answers.loss_mask).double()
    everyone[1, indices] = known.labels[:, 0].double()
    ratios, desirable = sum_over(everyone, group)
    chosen, rejected = ratios[desirable == 1], ratios[desirable == 0]
    return {
        "eval/loss": float(sample_losses(ratios, desirable, z0, cfg).mean()),
        "eval/accuracy": above(chosen, rejected),
        "eval/margin": cfg.beta * float(chosen.mean() - rejected.mean()),
        "eval/kl": z0,
    }


def score_statistics(model: RewardModel, dataset: Sequence, pairwise: bool) -> list[tuple[float, float]]:
    """Return (mean, standard deviation) of each output on the training set's first rows."""
    items, outputs = _own_rows(model.model, dataset, STATISTICS_ROWS), model.model.head.outputs
    scores = torch.zeros(0, outputs, dtype=torch.float64)
    if items:
        scores = model.raw_scores((collate_preference if pairwise else collate_scored)(items, 0)).double()
    count, columns = float(len(scores)), range(outputs)
    sums = {f"mean {k}": (float(scores[:, k].sum()), count) for k in columns}
    sums |= {f"square {k}": (float(scores[:, k].square().sum()), count) for k in columns}
    averages = reduce_metrics(sums, {}, model.model.layout.pgs.dp)
    means = [averages[f"mean {k}"] for k in columns]
    return [(mean, max(averages[f"square {k}"] - mean**2, 1e-12) ** 0.5) for k, mean in enumerate(means)]
