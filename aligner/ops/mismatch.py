"""How far the engine's distribution is from the trainer's, measured on the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.ops.kl import LOG_RATIO_LIMIT, kl_estimate


@torch.no_grad()
def mismatch_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """(means, maxima) as in `LossOutput`: sum numerators and denominators over ranks, then divide; take the maxima.

    All [B, T], both logprobs of the distribution that was sampled from; log r = old_logprobs - rollout_logprobs.
    `token_mult_prob_error` = mean exp|log r| (1 is perfect; |log r| clamped to 20), `logprob_abs_mean` = mean |log r|,
    `logprob_abs_max` = max |log r| (0 without tokens), `gen_kl` = mean k3 of KL(engine || trainer) = r - 1 - log r.
    Source of the first and last: NeMo-RL's token_mult_prob_error and gen_kl_error.
    """
    on = mask.bool()
    old, rollout = old_logprobs.float(), rollout_logprobs.float()
    size = torch.where(on, (old - rollout).abs(), 0.0)
    n = on.sum().double()

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(on, x.double(), 0.0).sum(), n

    means = {
        "mismatch/token_mult_prob_error": total(size.clamp_max(LOG_RATIO_LIMIT).exp()),
        "mismatch/logprob_abs_mean": total(size),
        "mismatch/gen_kl": total(kl_estimate(rollout, old, "k3")),
    }
    biggest = size.max() if size.numel() else torch.zeros((), device=size.device)
    return means, {"mismatch/logprob_abs_max": biggest}
