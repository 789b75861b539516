"""Logprobs and entropy of tokens from logits that may be sharded over the vocabulary.

The softmax over the vocabulary is never stored: forward and backward walk over the tokens in chunks, and backward
computes the softmax of a chunk again. The only tensor of the size of the logits made here is their gradient, in their
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.ops.kernels import fused
from aligner.ops.reduce import max_over, sum_over

IN_CACHE = 1 << 19  # logits of a chunk on a CPU


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 4096,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log_softmax(logits / temperature)[targets] and, with `entropy`, the entropy of that distribution (else
    None).

    logits [N, V_local], targets int64 [N] -> [N], [N]: the caller has shifted, row n predicts targets[n]. Rank r of
    `group` holds the columns [r * V_local, (r+1) * V_local) of the vocabulary. Columns at or beyond `vocab_size` are
    padding: they have probability 0 and get gradient 0. `chunk_tokens` bounds the rows that exist in float32 at a
    time. On a CPU without exchange they are fewer, so that each pass over a chunk finds it in the cache.

    Results are float32 (float64 for float64 logits) and equal on all ranks of `group`; each rank must pass the same
    gradient back, and gets that of its own columns.

    With z = logits / temperature and p = softmax(z): entropy H = -sum_j p_j log p_j; dlogp_i/dz_j = [i = j] - p_j;
    dH/dz_j = -p_j (log p_j + H).

    Sharded softmax as in Megatron-LM (arXiv:1909.08053, section 3): one max and one sum all-reduce per chunk.
    """
    assert logits.shape[:1] == targets.shape, (logits.shape, targets.shape)
    shard = VocabularyShard.of(logits, targets, temperature, vocab_size, group, chunk_tokens)
    return _TokenLogprobs.apply(logits, targets, shard, entropy)


def own_columns(
    logits: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (`group` if it has several ranks, the vocabulary id of this rank's first column, how many are no
    padding)."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    width = logits.shape[-1]
    assert ranks * width >= vocab_size, f"{ranks} shards of {width} columns hold less than vocab_size={vocab_size}"
    return group if ranks > 1 else None, rank * width, min(max(vocab_size - rank * width, 0), width)


def logit_numbers(x: Tensor) -> int:
    """Return how many float32 numbers each logit of this device and dtype takes in `token_logprobs`, with itself and
    its gradient."""
    return x.element_size() // 2 if fused.takes(x) else 3


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the vocabulary, and how a kernel walks over the tokens."""

    group: dist.ProcessGroup | None
    offset: int  # vocabulary id of column 0
    columns: int  # leading columns that are no padding
    temperature: float
    step: int  # tokens per chunk
    dtype: torch.dtype  # of the softmax

    @classmethod
    def of(
        cls,
        logits: Tensor,
        ids: Tensor | None,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_tokens: int = 4096,
    ) -> VocabularyShard:
        """Return the shard of logits [N, V_local], and check the vocabulary `ids` that are read, if any. Arguments
        are as in `token_logprobs`."""
        assert logits.dim() == 2, logits.shape
        assert temperature > 0, f"temperature {temperature}: logprobs need one above 0"
        group, offset, columns = own_columns(logits, vocab_size, group)
        on_cpu = logits.device.type == "cpu"
        if on_cpu and ids is not None and ids.numel():  # on a GPU this check would wait for the device
            low, high = ids.aminmax()
            assert low >= 0 and high < vocab_size, f"token ids in [{low}, {high}], vocab_size={vocab_size}"
        if on_cpu and group is None:
            chunk_tokens = min(chunk_tokens, IN_CACHE // max(1, logits.shape[-1]))
        return cls(
            group=group,
            offset=offset,
            columns=columns,
            temperature=temperature,
            step=max(1, chunk_tokens),
            dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
        )

    def chunks(self, tokens: int):
        return (slice(a, min(a + self.step, tokens)) for a in range(0, tokens, self.step))

    def tempered(self, logits: Tensor, at: slice) -> Tensor:
        """Return z [n, columns]; it may be a view of the logits, so never write to it."""
        z = logits[at, : self.columns].to(self.dtype)
        return z if self.temperature == 1 else z / self.temperature

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each target's column [n], clamped into this shard, and whether it is in this shard [n]."""
        column = targets - self.offset
        here = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(self.columns - 1, 0)), here


def less(z: Tensor, by: Tensor, logits: Tensor) -> Tensor:
    """Return z [n, columns] - by [n], to be written to: in z itself if that is a copy of the logits, not a view."""
    owned = z.untyped_storage()._cdata != logits.untyped_storage()._cdata
    return z.sub_(by[:, None]) if owned else z - by[:, None]


def log_sum_exp(tensors: tuple[Tensor, ...], shard: VocabularyShard) -> Tensor:
    """Return the log-sum-exp [tensors, n] over all columns of the group."""
    if shard.group is None:
        return torch.stack([z.logsumexp(-1) for z in tensors])
    # a shard can be all padding, with no column to take the maximum of
    tops = [z.amax(-1) if shard.columns else z.new_full(z.shape[:1], -torch.inf) for z in tensors]
    most = max_over(torch.stack(tops), shard.group)
    sums = torch.stack([(z - m[:, None]).exp().sum(-1) for z, m in zip(tensors, most, strict=True)])
    return most + sum_over(sums, shard.group).log()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, shard: VocabularyShard, entropy: bool):
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        if fused.takes(logits):
            logprobs, entropies, lse = _in_one_pass(logits, targets, shard, entropy)
            ctx.save_for_backward(logits, targets, lse, entropies)
            return logprobs, entropies
        logprobs = torch.zeros(targets.shape, dtype=shard.dtype, device=logits.device)
        entropies = torch.zeros_like(logprobs) if entropy else None
        lse = torch.zeros_like(logprobs) if shard.group is not None else None
        for at in shard.chunks(len(targets)):
            if lse is None:
                lp, h = _whole(shard.tempered(logits, at), targets[at], entropy)
            else:
                lp, h, lse[at] = _sharded(shard.tempered(logits, at), targets[at], shard, entropy, logits)
            logprobs[at] = lp
            if entropies is not None:
                entropies[at] = h
        ctx.save_for_backward(logits, targets, lse, entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprobs: Tensor | None, g_entropy: Tensor | None):
        logits, targets, lse, entropies = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        n = shard.columns
        if fused.takes(logits):
            zero, both = torch.zeros_like(lse), g_entropy is not None
            numbers = [lse, g_logprobs, entropies if both else None, g_entropy]
            numbers = torch.stack([zero if x is None else x for x in numbers])
            where = shard.offset, n, 1 / shard.temperature, both
            return torch.ops.aligner.token_gradient(logits, targets, numbers, *where), None, None, None
        grad = torch.empty_like(logits)
        grad[:, n:] = 0
        for at in shard.chunks(len(targets) if n else 0):
            logp = shard.tempered(logits, at)
            logp = torch.log_softmax(logp, -1) if lse is None else less(logp, lse[at], logits)
            if g_entropy is None:
                dz = logp.exp_()
                weight = torch.zeros((), dtype=dz.dtype, device=dz.device)
            else:
                dz = logp.exp()
                # -inf logits have p = 0 and no gradient; without the clamp it would be 0 * inf
                logp = logp.clamp_min_(torch.finfo(logp.dtype).min / 4)
                weight = logp.add_(entropies[at, None]).mul_(g_entropy[at, None] / -shard.temperature)
            if g_logprobs is None:
                dz.mul_(weight)
            else:
                g = g_logprobs[at] / shard.temperature
                dz.mul_(weight.sub_(g[:, None]) if weight.dim() else weight - g[:, None])
                column, here = shard.local(targets[at])
                dz.scatter_add_(-1, column[:, None], (g * here)[:, None])
            grad[at, :n] = dz
        return grad, None, None, None


def _in_one_pass(
    logits: Tensor, targets: Tensor, shard: VocabularyShard, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what `_sharded` does, of all tokens, by one kernel (`cuda/token_softmax.py`). A shard that is all padding
    has a sum of 0."""
    where = shard.offset, shard.columns, 1 / shard.temperature, entropy
    top, total, weighted, target = torch.ops.aligner.token_sums(logits, targets, *where)
    if shard.group is not None:
        most = max_over(top.clone(), shard.group)
        below = top - most
        sums = torch.stack([total, weighted + below * total, target + below])
        sums[:2].mul_(below.exp())
        sums[2].mul_(shard.local(targets)[1])
        total, weighted, target = sum_over(sums, shard.group)
        top = most
    log_total = total.log()
    return target - log_total, log_total - weighted / total if entropy else None, top + log_total


def _whole(z: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Compute one fused log-softmax: the fast way if this process has all columns. The caller does not keep z."""
    logp = torch.log_softmax(z, -1)
    del z
    lp = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not entropy:
        return lp, None
    p = logp.exp()
    return lp, -p.mul_(logp.clamp_min_(torch.finfo(logp.dtype).min)).sum(-1)


def _sharded(
    z: Tensor, targets: Tensor, shard: VocabularyShard, entropy: bool, logits: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return logprob, entropy and log-sum-exp [n]. With m the global maximum, it reduces sum e^(z-m), z_target - m
    and sum e^(z-m) (z-m) together."""
    # a shard can be all padding, with no column to take the maximum of
    m = z.amax(-1) if shard.columns else z.new_full(targets.shape, -torch.inf)
    m = max_over(m, shard.group)
    z = less(z, m, logits)
    column, here = shard.local(targets)
    target = torch.where(here, z.gather(-1, column[:, None]).squeeze(-1), 0.0) if shard.columns else torch.zeros_like(m)
    e = z.exp()
    parts = [e.sum(-1), target]
    if entropy:
        parts.append(e.mul_(z.clamp_min_(torch.finfo(z.dtype).min)).sum(-1))
    total, target, *weighted = sum_over(torch.stack(parts), shard.group)
    log_total = total.log()
    return target - log_total, log_total - weighted[0] / total if entropy else None, m + log_total
