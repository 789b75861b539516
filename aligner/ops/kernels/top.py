"""The most likely tokens of a distribution: which, how likely, and how likely they are to another model; from logits
that may be sharded over the vocabulary."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.ops.kernels.logprobs import VocabularyShard, log_sum_exp
from aligner.ops.reduce import sum_over

HIGHEST = -1e-6  # of the log-mass of k tokens: what is left of 1 in float32 is rounding


def top_logprobs(
    logits: Tensor, k: int, *, temperature: float = 1.0, vocab_size: int, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest log_softmax(logits / temperature), descending, and their ids: float32 (float64), int64 [N,
    k].

    logits [N, V_local], sharded as in `token_logprobs`: each rank's k largest, and of those the k largest; no rank
    sees a whole row. Without gradient.
    """
    assert 1 <= k <= vocab_size, f"the {k} most likely of {vocab_size} tokens"
    shard = VocabularyShard.of(logits, None, temperature, vocab_size, group)
    values = torch.zeros(len(logits), k, dtype=shard.dtype, device=logits.device)
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    for at in shard.chunks(len(logits)):
        z = shard.tempered(logits.detach(), at)
        lse = log_sum_exp((z,), shard)[0]
        best, where = z.topk(min(k, shard.columns), -1)
        where = where + shard.offset
        if shard.group is not None:
            best = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-torch.inf)
            where = torch.nn.functional.pad(where, (0, k - where.shape[1]))
            best, where = _gathered(best, shard.group), _gathered(where, shard.group)
            best, chosen = best.topk(k, -1)
            where = where.gather(-1, chosen)
        values[at], ids[at] = best - lse[:, None], where
    return values, ids


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [n, k] of every rank -> [n, ranks * k]."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def logprobs_at(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 4096,
) -> Tensor:
    """Return log_softmax(logits / temperature) of `ids` int64 [N, k] -> [N, k]: `token_logprobs` of several tokens
    each."""
    shard = VocabularyShard.of(logits, ids, temperature, vocab_size, group, chunk_tokens)
    return _LogprobsAt.apply(logits, ids, shard)


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, shard: VocabularyShard):
        logprobs = torch.zeros(ids.shape, dtype=shard.dtype, device=logits.device)
        lse = torch.zeros(len(logits), dtype=shard.dtype, device=logits.device)
        for at in shard.chunks(len(logits)):
            z = shard.tempered(logits, at)
            lse[at] = log_sum_exp((z,), shard)[0]
            if shard.columns:
                column, here = shard.local(ids[at])
                logprobs[at] = torch.where(here, z.gather(-1, column), 0.0)
        logprobs = sum_over(logprobs, shard.group) - lse[:, None]
        ctx.shard = shard
        ctx.save_for_backward(logits, ids, lse)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        logits, ids, lse = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        grad = torch.zeros_like(logits)
        for at in shard.chunks(len(logits) if shard.columns else 0):
            scaled = g[at] / shard.temperature
            dz = -(shard.tempered(logits, at) - lse[at, None]).exp() * scaled.sum(-1, keepdim=True)
            column, here = shard.local(ids[at])
            grad[at, : shard.columns] = dz.scatter_add_(-1, column, scaled * here)
        return grad, None, None


def bucketed(logp: Tensor, logq: Tensor, outside: str) -> tuple[Tensor, Tensor]:
    """Convert logprobs of the k tokens [N, k] by teacher and student to those that a divergence compares.

    tail         [N, k + 1]: one more for all the others together, log(1 - sum)
    renormalise  [N, k]: as if there were no others
    zero         [N, k]: the teacher as if there were no others, the student unchanged. The sum of forward_kl is then
                 KL(teacher on its k tokens, student), never negative; it is -log of the mass of the k tokens, not 0,
                 where both are the same. Likewise NeMo-RL's `zero_outside_topk` (its forward KL)
    """
    assert outside in ("tail", "renormalise", "zero"), outside
    masses = [x.logsumexp(-1, keepdim=True) for x in (logp, logq)]
    if outside == "zero":
        return logp - masses[0], logq
    if outside == "renormalise":
        return logp - masses[0], logq - masses[1]
    return tuple(torch.cat([x, log1mexp(m.clamp_max(HIGHEST))], -1) for x, m in zip((logp, logq), masses, strict=True))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) of x < 0, precise at both ends (Maechler 2012)."""
    near = x > -math.log(2)
    # `where` has gradients on both sides: the other side's argument must be harmless
    return torch.where(
        near,
        (-torch.expm1(x.where(near, -1.0))).log(),
        torch.log1p(-x.where(~near, -1.0).exp()),
    )
