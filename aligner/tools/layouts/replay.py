"""Losses and gradients of a tiny model on a layout: the part that ranks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.losses import policy_loss
from aligner.config.schema import Config
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.optim import OptimConfig
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.ops.rl.by_rank import with_partners
from aligner.refit.stream import WeightStream
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.stages.dpo import dpo_loss
from aligner.stages.ppo import value_loss
from aligner.stages.rm import preference_loss
from aligner.stages.sft import sft_loss
from aligner.tools.layouts.cases import LayoutCase
from aligner.tools.layouts.weights import wild_source
from aligner.types import LabelTargets, PolicyTargets, ScalarMetrics, TrainBatch, ValueTargets

# Adam with a huge eps and no memory is gradient descent. With so large a learning rate the update is the gradient to
# float32's precision, not what is left of it beside the weight. Nothing is clipped, but the norm is computed
STEEP = OptimConfig(lr=1e8, eps=1e4, betas=[0.0, 0.0], weight_decay=0.0, clip_grad=1e30)
SCORED = ("scores", "values")  # kinds of models with a score head
KINDS = {
    "rm": ("scores",),
    "dpo": ("pairs",),
    "online_dpo": ("pairs",),
    "grpo": ("policy",),
    "ppo": ("policy", "values"),
}
GROUP, GROUPS, WIDTH, BEGINNING = 4, 2, 14, 5  # rows of a group have a common beginning
LIMIT = 16  # tokens of a response
VALUE_CLIP = 0.2


def kinds_of(cfg: Config) -> tuple[str, ...]:
    """Return the kinds of losses of a run's stage. Stages that have no other here: the likelihood of answers."""
    kinds = KINDS.get(cfg.stage.name, ("likelihood",))
    # a critic without a trunk of its own has no adapters
    return kinds[:1] if cfg.model.lora.rank else kinds


def full_weights(model: ShardedModel) -> dict[str, Tensor]:
    """Return all weights by their names in files. Collective."""
    return {name: t.clone() for bucket in WeightStream(model, 1 << 20) for name, t in bucket}


def training_rows(vocab_size: int, seed: int = 1) -> TrainBatch:
    """Return ragged rows in groups with a common beginning, and numbers at random for every loss."""
    g, count = torch.Generator().manual_seed(seed), GROUP * GROUPS
    tokens = torch.randint(1, vocab_size, (count, WIDTH), generator=g)
    tokens[:, :BEGINNING] = tokens[::GROUP, :BEGINNING].repeat_interleave(GROUP, 0)
    lengths = torch.randint(BEGINNING + 2, WIDTH + 1, (count,), generator=g)
    lengths[0] = WIDTH
    real = torch.arange(WIDTH) < lengths[:, None]
    mask = (real & (torch.arange(WIDTH) >= BEGINNING)).float()
    noise = [torch.randn(count, WIDTH, generator=g) for _ in range(4)]
    labels = torch.randn(count, generator=g)
    old = -5.0 + 0.3 * noise[0]
    policy = PolicyTargets(labels[:, None] * mask, old, old + 0.1 * noise[1], rollout_logprobs=old + 0.01 * noise[2])
    policy = replace(policy, positive=(labels > 0).float(), row_keys=torch.arange(count) * 7919)
    values = ValueTargets(labels[:, None] + 0.1 * noise[2], 0.1 * noise[3])
    return TrainBatch(tokens * real, lengths, mask, [policy, values, LabelTargets(labels, old)])


def own_share(rows: TrainBatch, model: ShardedModel) -> TrainBatch:
    """Return this data-parallel rank's rows, as many as every other's."""
    size, rank = len(rows.lengths) // model.layout.data, model.layout.dp_rank
    return rows.select(torch.arange(rank * size, (rank + 1) * size)).trim()


def with_pair_labels(rows: TrainBatch) -> TrainBatch:
    """Return pairs with margins, rewards and weights."""
    known = rows.of(LabelTargets)
    labels = torch.stack([known.labels, known.labels, torch.ones_like(known.labels)], 1)
    return rows.with_payloads(LabelTargets(labels, known.ref_logprobs))


def update(
    kind: str, model: ShardedModel, rows: TrainBatch, batch: BatchConfig, cfg: AlgorithmConfig, temperature: float = 1.0
) -> tuple[float, ScalarMetrics]:
    """Take one optimizer step by the role and the loss of a kind of stage. Return the loss before it, and metrics."""
    group = model.layout.pgs.dp
    if kind == "scores":
        loss = preference_loss(len(rows.lengths) // 2, cfg, group)
        stats = RewardModel(model, batch).update(rows, loss, 2)
        return stats["rm/loss"], stats
    if kind == "values":
        stats = Critic(model, batch).update(rows, value_loss(rows, VALUE_CLIP, group))
        return stats["critic/loss"], stats
    if kind == "pairs":
        pairs, preference = with_pair_labels(rows), cfg.preference
        if preference.reference == "none":
            pairs.of(LabelTargets).ref_logprobs = None
        role = Policy(model, batch, entropy=False, log_squares=preference.wpo)
        if preference.by_rank:
            logprobs = role.logprobs(pairs, pairs.loss_mask, unit=2)
            pairs.of(LabelTargets).labels = with_partners(pairs, logprobs, preference, group)
        stats = role.update(pairs, dpo_loss(pairs, preference, group), 2)
    elif kind == "policy":
        loss = policy_loss(rows, cfg, cfg.kl.coef, LIMIT, group, dtype=model.dtype)
        stats = Policy(model, batch, temperature).update(rows, loss)
    else:
        stats = Policy(model, batch, temperature).update(rows, sft_loss(rows, group, cfg.sft_loss))
    return stats["policy/loss"], stats


def build(case: LayoutCase, head: Head = Head(), optim: OptimConfig = STEEP) -> ShardedModel:  # noqa: B008 (frozen)
    """Build the case's model on its layout, over the whole world."""
    assert case.model is not None
    cfg, layout, source = case.model, build_layout(case.parallel), wild_source(case.model)
    options = case.batch.packing, case.batch.share_prompts
    cfg, optim = replace(cfg, recompute=case.recompute), replace(optim, distributed=case.distributed)
    return ShardedModel(cfg, layout, head, case.dtype, torch.device("cpu"), source, optim, 10, *options)


def gradients(
    case: LayoutCase,
    kind: str,
    cfg: AlgorithmConfig,
    temperature: float = 1.0,
    rows: Callable[[int], TrainBatch] = training_rows,
) -> dict[str, Any]:
    """Return {"loss", "norm", "gradient", "metrics"} of one update of the case's model: the loss before it, the norm
    of the gradient as the optimizer computes it, and the gradient of every full tensor. Collective."""
    model = build(case, Head("score" if kind in SCORED else "lm"))
    start = full_weights(model)
    loss, metrics = update(kind, model, own_share(rows(model.cfg.vocab_size), model), case.batch, cfg, temperature)
    scale = STEEP.lr / STEEP.eps
    gradient = {n: (start[n].double() - t.double()) / scale for n, t in full_weights(model).items()}
    (norm,) = (value for name, value in metrics.items() if name.endswith("grad_norm"))
    return {"loss": loss, "norm": norm, "gradient": gradient, "metrics": metrics}
