"""The policy's loss of a minibatch: pure functions of `ops`, with the minibatch's denominators bound in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.algorithms.anchor import Anchor
from aligner.config.on_demand import on_demand
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.ops.rl.aggregate import aggregate, denominator
from aligner.ops.rl.covariance import choose_random, choose_top, covariance, token_keys
from aligner.ops.rl.kl import NOISE, kl_estimator
from aligner.ops.rl.mismatch import weight_sums
from aligner.ops.rl.policy_loss import POLICY_LOSSES
from aligner.ops.rl.policy_term import PolicyTerm
from aligner.roles.policy import TokenOutputs
from aligner.rollout.statistics import trainer_sums
from aligner.types import LossOutput, PolicyTargets, TrainBatch
from aligner.user_code import is_path


def policy_loss(
    minibatch: TrainBatch,
    cfg: AlgorithmConfig,
    kl_coef: float,
    response_limit: int,
    group: dist.ProcessGroup,
    anchor: Anchor = Anchor(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
) -> Callable[[TokenOutputs, TrainBatch], LossOutput]:
    """Return the configured policy loss, plus KL in the loss and minus the entropy bonus where configured.

    Without old_logprobs `anchor` derives them from those of this pass, and the metrics that compare the policy with
    engine and reference come from here. `dtype` is the model's: |log r| has no gradient within its rounding.

    What depends on the whole minibatch, over all ranks of `group`, is computed here, before it is cut into
    micro-batches: the denominator, and for clip_cov and kl_cov the chosen tokens, which are stored in its
    `PolicyTargets`.
    """
    if cfg.policy_loss in ("clip_cov", "kl_cov"):
        minibatch.of(PolicyTargets).chosen = _choose(minibatch, cfg, group)
    total = denominator(minibatch.loss_mask, cfg.aggregation, response_limit, group)
    positives, observations = _positive_tokens(minibatch, group), minibatch.of(PolicyTargets).observed
    others = None if observations is None else denominator(observations, cfg.aggregation, response_limit, group)
    compute = on_demand("algorithm.policy_loss")(cfg) if is_path(cfg.policy_loss) else POLICY_LOSSES[cfg.policy_loss]
    mean, noise = partial(aggregate, kind=cfg.aggregation, denominator=total), NOISE[dtype]
    estimate = kl_estimator(cfg, noise)

    def loss(out: TokenOutputs, batch: TrainBatch) -> LossOutput:
        mask, targets = batch.loss_mask, batch.of(PolicyTargets)
        means, maxima = {}, {}
        if targets.old_logprobs is None:
            means, maxima = trainer_sums(targets, out.logprobs.detach(), mask)
            targets = anchor(targets, out.logprobs.detach())
            if targets.token_weights is not None:
                means |= weight_sums(targets.response_mask, targets.token_weights)
        term = compute(out.logprobs, targets, mask, cfg, noise)
        # engine against trainer: weighs tokens, and the denominators do not know it
        weighed = term.per_token if targets.token_weights is None else term.per_token * targets.token_weights
        value = mean(weighed, mask)
        if cfg.kl.placement == "loss" and targets.ref_logprobs is not None:
            kl = estimate(out.logprobs, targets.ref_logprobs)
            if cfg.kl.importance_weighted:  # by the token's ratio, whatever the surrogate's is: it is a token's term
                kl = kl * torch.exp((out.logprobs - targets.old_logprobs).clamp(-20, 20))
            value = value + kl_coef * mean(kl, mask)
        if positives is not None:
            chosen = mask * targets.positive[:, None]
            value = value + cfg.positive.coef * aggregate(-out.logprobs, chosen, "token_mean", positives)
            means["policy/positive_nll"] = -(out.logprobs.detach() * chosen).sum(), chosen.sum()
        if others is not None:
            unlikely = aggregate(-out.logprobs, targets.observed, cfg.aggregation, others)
            value = value + cfg.observation_coef * unlikely
            means["policy/observation_nll"] = -(out.logprobs.detach() * targets.observed).sum(), targets.observed.sum()
        if cfg.entropy_coef:
            value = value - cfg.entropy_coef * mean(out.entropy, mask)
        maxima |= {"policy/ratio_max": (term.ratio * mask).max()}
        return LossOutput(value, means | _policy_means(out, term, mask, targets), maxima)

    return loss


def _positive_tokens(minibatch: TrainBatch, group: dist.ProcessGroup) -> Tensor | None:
    """Return the number of tokens whose likelihood is in the loss (`algorithm.positive`); None: it is off. VAPO,
    arXiv:2504.05118: loss + coef * mean of -log pi over the tokens of right responses."""
    positive = minibatch.of(PolicyTargets).positive
    return None if positive is None else denominator(minibatch.loss_mask * positive[:, None], "token_mean", group=group)


def _choose(minibatch: TrainBatch, cfg: AlgorithmConfig, group: dist.ProcessGroup) -> Tensor:
    """Return float32 [B, T]: the tokens of the minibatch that clip_cov drops or kl_cov holds back."""
    mask, targets = minibatch.loss_mask, minibatch.of(PolicyTargets)
    cov = covariance(targets.advantages, targets.old_logprobs, mask, group)
    keys = token_keys(targets.row_keys, mask.shape[1])
    if cfg.policy_loss == "clip_cov":
        return choose_random(cov, mask, keys, cfg.cov.fraction, cfg.cov.low, cfg.cov.high, group)
    return choose_top(cov, mask, keys, cfg.cov.fraction, group)


def _policy_means(
    out: TokenOutputs, term: PolicyTerm, mask: Tensor, targets: PolicyTargets
) -> dict[str, tuple[Tensor, Tensor]]:
    count = mask.sum()

    def mean(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.detach().float() * mask).sum(), count

    lr = (out.logprobs.detach() - targets.old_logprobs).clamp(-20, 20)
    means = {
        "policy/clip_fraction": mean(term.clipped_low | term.clipped_high),
        "policy/clip_fraction_low": mean(term.clipped_low),
        "policy/clip_fraction_high": mean(term.clipped_high),
        "policy/ratio_mean": mean(term.ratio),
        "policy/approx_kl": mean(torch.exp(lr) - 1 - lr),  # k3 of KL(old || new)
    }
    if targets.chosen is not None:
        means["policy/chosen_fraction"] = mean(targets.chosen)
    if out.entropy is not None:
        means["policy/entropy"] = mean(out.entropy)
    return means
