"""Distance of the engine's distribution from the trainer's, measured on the sampled tokens, and its corrections.

r = old probability / rollout probability = exp(old_logprobs - rollout_logprobs), of the full tempered distribution on
both sides: top-p, top-k and min-p are not undone. Log-ratios are clamped to +-20 before exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aligner.ops.rl.kl import LOG_RATIO_LIMIT, kl_estimate

MOMENTS = ("p", "q", "pp", "qq", "pq")  # of the probabilities p (trainer) and q (engine), for their correlation


@torch.no_grad()
def mismatch_sums(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    current_logprobs: Tensor | None = None,
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Return (means, maxima) as in `LossOutput`: sum numerators and denominators over ranks and divide, take the
    maxima, then `finish_mismatch`.

    All [B, T]; log r = old_logprobs - rollout_logprobs. `token_mult_prob_error` = mean exp|log r| (1 is perfect),
    `logprob_abs_mean` = mean |log r|, `logprob_abs_max` = max |log r| (0 without tokens), `gen_kl` = mean k3 of
    KL(engine || trainer) = r - 1 - log r, `prob_correlation` (after `finish_mismatch`) = Pearson's over the
    probabilities of the sampled tokens. Source of the first and the KL: NeMo-RL's token_mult_prob_error and
    gen_kl_error.

    old_logprobs are by the trainer with the weights the engine had. Where the policy is ahead of those,
    `current_logprobs` are its own: `staleness/logprob_abs_mean` and `staleness/kl` (k3 of KL(old || current)) are
    kept apart from the mismatch. None: it is not ahead.
    """
    on = mask.bool()
    old, rollout = old_logprobs.float(), rollout_logprobs.float()
    current = old if current_logprobs is None else current_logprobs.float()
    size = torch.where(on, (old - rollout).abs(), 0.0)
    n = on.sum().double()

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(on, x.double(), 0.0).sum(), n

    p, q = old.double().exp(), rollout.double().exp()
    means = {
        "mismatch/token_mult_prob_error": total(size.clamp_max(LOG_RATIO_LIMIT).exp()),
        "mismatch/logprob_abs_mean": total(size),
        "mismatch/gen_kl": total(kl_estimate(rollout, old, "k3")),
        "staleness/logprob_abs_mean": total((current - old).abs()),
        "staleness/kl": total(kl_estimate(old, current, "k3")),
    }
    means |= {f"mismatch/moment_{k}": total(x) for k, x in zip(MOMENTS, (p, q, p * p, q * q, p * q), strict=True)}
    biggest = size.max() if size.numel() else torch.zeros((), device=size.device)
    return means, {"mismatch/logprob_abs_max": biggest}


@torch.no_grad()
def cut_sums(rollout_logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `mismatch/cut_logprob_mean`: the engine's logprobs in the distribution that was sampled from, cut by
    top-p, top-k or min-p, minus those in the full one. That is -log of the probability kept. All [B, T]."""
    on = mask.bool()
    kept = torch.where(on, sampled_logprobs.double() - rollout_logprobs.double(), 0.0)
    return {"mismatch/cut_logprob_mean": (kept.sum(), on.sum().double())}


@torch.no_grad()
def worst_token(a: Tensor, b: Tensor, mask: Tensor) -> tuple[float, int, int]:
    """Return (|a - b|, row, column) of the masked token of [B, T] where they differ most; a NaN is the largest of
    all."""
    gap = torch.where(mask.bool(), (a - b).abs().nan_to_num(nan=torch.inf), 0.0)
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    return float(gap[row, column]), row, column


def weight_sums(mask: Tensor, weights: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `weight_mean` over response tokens and `weight_zero_fraction` (tokens left out) of a correction's
    weights, None: all 1. Both [B, T]."""
    on = mask.bool()
    weights = torch.ones_like(mask) if weights is None else weights
    kept = torch.where(on, weights.double(), 0.0)
    return {
        "mismatch/weight_mean": (kept.sum(), on.sum().double()),
        "mismatch/weight_zero_fraction": ((on & (weights == 0)).sum().double(), on.sum().double()),
    }


def finish_mismatch(metrics: dict[str, float]) -> dict[str, float]:
    """Return reduced metrics with the moments of the probabilities turned into `mismatch/prob_correlation`: NaN where
    one side's do not vary. Others pass unchanged."""
    left = {name: value for name, value in metrics.items() if not name.startswith("mismatch/moment_")}
    if len(left) == len(metrics):
        return left
    p, q, pp, qq, pq = (metrics[f"mismatch/moment_{k}"] for k in MOMENTS)
    spread = (pp - p * p) * (qq - q * q)
    # below rounding there is no variance to speak of; its square root must not be noise over noise
    known = pp - p * p > 1e-14 * pp and qq - q * q > 1e-14 * qq
    left["mismatch/prob_correlation"] = (pq - p * q) / math.sqrt(spread) if known else math.nan
    return left


# --- corrections: weights of tokens, or samples to leave out. log_ratio and mask [B, T]


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def tis_token(log_ratio: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return truncated importance sampling weights per token: min(r, cap), float32 [B, T], 1 where mask is 0.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025).
    """
    return torch.where(mask.bool(), _ratio(log_ratio).clamp_max(cap), 1.0)


@torch.no_grad()
def tis_sequence(log_ratio: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return min(product of the row's r, cap) on each of its tokens, float32 [B, T], 1 where mask is 0. Source: as
    above."""
    on = mask.bool()
    product = _ratio(torch.where(on, log_ratio.double(), 0.0).sum(1, keepdim=True))
    return torch.where(on, product.clamp_max(cap), 1.0)


@torch.no_grad()
def icepop(log_ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return r inside [low, high] and 0 outside, float32 [B, T], 1 where mask is 0. Source: "Every step evolves"
    (Ling team, arXiv:2510.18855), IcePop."""
    r = _ratio(log_ratio)
    return torch.where(mask.bool(), torch.where((r >= low) & (r <= high), r, 0.0), 1.0)


@torch.no_grad()
def geometric_mask(log_ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return bool [B], the samples to keep: exp(mean over the row of log r) inside [low, high]. Rows without tokens
    stay."""
    on = mask.bool()
    mean = torch.where(on, log_ratio.double(), 0.0).sum(1) / on.sum(1).clamp_min(1)
    return (mean >= math.log(low)) & (mean <= math.log(high))


@torch.no_grad()
def veto(log_ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Return bool [B], the samples to keep: every token's r inside [low, high]. Rows without tokens stay."""
    inside = (log_ratio.double() >= math.log(low)) & (log_ratio.double() <= math.log(high))
    return (inside | ~mask.bool()).all(1)


WEIGHTS = {"tis_token": tis_token, "tis_sequence": tis_sequence, "icepop": icepop}
REJECTIONS = {"geometric_mask": geometric_mask, "veto": veto}
