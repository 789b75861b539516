"""How far a student's distributions are from a teacher's, from logits that may be sharded over the vocabulary.

p is the teacher, q the student, softmax(logits / temperature) each, sums over the vocabulary:

    forward_kl  KL(p, q) = sum p (log p - log q)
    reverse_kl  KL(q, p)
    mixed       beta KL(p, q) + (1 - beta) KL(q, p)
    jsd         beta KL(p, M) + (1 - beta) KL(q, M), M = beta p + (1 - beta) q          (GKD, arXiv:2306.13649)

A jsd is 0 at beta 0 and 1, not a KL: jsd / beta -> KL(p, q) for beta -> 0, jsd / (1 - beta) -> KL(q, p) for beta ->
1.

No softmax is stored: forward and backward walk over the tokens in chunks, and backward computes a chunk's again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.ops.kernels.logprobs import VocabularyShard, log_sum_exp
from aligner.ops.reduce import sum_over


@dataclass(frozen=True)
class Divergence:
    kind: str = "forward_kl"
    beta: float = 0.5

    @property
    def forward_share(self) -> float:
        """The share of KL(p, q), the rest being KL(q, p); not of jsd."""
        return {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed": self.beta}[self.kind]

    def mixture(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Return log M of jsd."""
        return torch.logaddexp(logp + math.log(self.beta), logq + math.log1p(-self.beta))

    def terms(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Return the terms of the sum, from finite logprobs of any shape. Differentiable in logq."""
        if self.kind == "jsd":
            logm = self.mixture(logp, logq)
            return self.beta * logp.exp() * (logp - logm) + (1 - self.beta) * logq.exp() * (logq - logm)
        share, terms = self.forward_share, torch.zeros_like(logq)
        if share:
            terms = terms + share * logp.exp() * (logp - logq)
        return terms + (1 - share) * logq.exp() * (logq - logp) if share < 1 else terms

    def centred(self, logp: Tensor, logq: Tensor) -> Tensor | None:
        """Return w in the gradient below; None where it has none."""
        if self.kind == "jsd":
            return logq - self.mixture(logp, logq)
        return logq - logp if self.forward_share < 1 else None


class Divergences(NamedTuple):
    """Tensors [N], float32 (float64 of float64), equal on all ranks of the group."""

    value: Tensor
    kl: Tensor  # KL(p, q), without gradient, as the rest
    entropy: Tensor  # of the teacher


def divergences(
    student: Tensor,
    teacher: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 4096,
) -> Divergences:
    """Compute divergences. student [N, V_local], teacher [N, >= the columns of V_local below vocab_size], sharded as
    in `token_logprobs`.

    With s = 1 / temperature, dKL(p, q)/dlogit_j = s (q_j - p_j). The others are, with w = log q - log p (jsd: log q -
    log M) and c = sum q w, s q_j (w_j - c), for jsd times 1 - beta.
    """
    shard = VocabularyShard.of(student, None, temperature, vocab_size, group, chunk_tokens)
    assert teacher.shape[0] == student.shape[0] and teacher.shape[1] >= shard.columns, (student.shape, teacher.shape)
    return Divergences(*_Divergences.apply(student, teacher, shard, divergence))


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor, shard: VocabularyShard, divergence: Divergence):
        sums = torch.zeros(4, len(student), dtype=shard.dtype, device=student.device)
        lses = torch.zeros(2, len(student), dtype=shard.dtype, device=student.device)
        for at in shard.chunks(len(student)):
            logq, logp, lses[:, at] = _logprobs(student, teacher, at, shard, None)
            p, w = logp.exp(), divergence.centred(logp, logq)
            kl = (p * (logp - logq)).sum(-1)
            parts = [kl if w is None else divergence.terms(logp, logq).sum(-1), kl, -(p * logp).sum(-1)]
            parts.append(torch.zeros_like(kl) if w is None else (logq.exp() * w).sum(-1))
            sums[:, at] = sum_over(torch.stack(parts), shard.group)
        value, kl, entropy, centre = sums.unbind()
        ctx.shard, ctx.divergence = shard, divergence
        ctx.save_for_backward(student, teacher, lses, centre)
        ctx.mark_non_differentiable(kl, entropy)
        ctx.set_materialize_grads(False)
        return value, kl, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor | None, *unused):
        if g is None:
            return None, None, None, None
        student, teacher, lses, centre = ctx.saved_tensors
        shard, divergence = ctx.shard, ctx.divergence
        grad = torch.zeros_like(student)
        for at in shard.chunks(len(student) if shard.columns else 0):
            logq, logp, _ = _logprobs(student, teacher, at, shard, lses[:, at])
            q, w = logq.exp(), divergence.centred(logp, logq)
            if divergence.kind == "jsd":
                dz = (1 - divergence.beta) * q * (w - centre[at, None])
            else:
                share = divergence.forward_share
                dz = share * (q - logp.exp())
                if w is not None:
                    dz += (1 - share) * q * (w - centre[at, None])
            grad[at, : shard.columns] = dz * (g[at, None] / shard.temperature)
        return grad, None, None, None


def _logprobs(
    student: Tensor, teacher: Tensor, at: slice, shard: VocabularyShard, lses: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of both [n, columns] and log-sum-exps [2, n]. Logprobs are finite: that of a probability of 0
    is very low."""
    both = shard.tempered(student, at), shard.tempered(teacher, at)
    if lses is None:
        lses = log_sum_exp(both, shard)
    low = torch.finfo(shard.dtype).min / 4
    logq, logp = ((z - lse[:, None]).clamp_min(low) for z, lse in zip(both, lses, strict=True))
    return logq, logp, lses
