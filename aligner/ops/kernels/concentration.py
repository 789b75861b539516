"""How concentrated the distribution of a token is: the probability that two draws from it agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.kernels.logprobs import own_columns
from aligner.ops.reduce import max_over, sum_over

CHUNK_TOKENS = 4096


@torch.no_grad()
def log_square_sum(
    logits: Tensor, *, temperature: float = 1.0, vocab_size: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return log sum_v p_v^2 with p = softmax(logits / temperature), float32 [N] (float64 of float64).

    logits [N, V_local], sharded over `group` by columns as in `token_logprobs`: a softmax over all ranks, its squares
    summed by them. At most CHUNK_TOKENS rows exist in float32 at a time.
    """
    group, _, columns = own_columns(logits, vocab_size, group)
    return torch.cat([_chunk(chunk[:, :columns], temperature, group) for chunk in logits.split(CHUNK_TOKENS)])


def _chunk(logits: Tensor, temperature: float, group: dist.ProcessGroup | None) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # a shard can be all padding, with no column to take the maximum of
    most = max_over(z.amax(-1) if z.shape[1] else z.new_full(z.shape[:1], -torch.inf), group)
    e = (z - most[:, None]).exp()
    sums = sum_over(torch.stack([e.sum(-1), e.square().sum(-1)]), group)
    return sums[1].log() - 2 * sums[0].log()
