"""Whether the most likely token is the one that stands there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import max_over


@torch.no_grad()
def greedy_hits(logits: Tensor, targets: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """float32 [N]: 1 where the target has the largest logit of its row (ties count).

    logits [N, V_local], sharded over `group` by columns as in `token_logprobs`; targets int64 [N].
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    width = logits.shape[-1]
    columns = min(max(vocab_size - rank * width, 0), width)
    low = torch.finfo(torch.float32).min
    logits = logits[:, :columns]
    best = logits.amax(-1).float() if columns else torch.full(targets.shape, low, device=logits.device)
    local = targets - rank * width
    mine = (local >= 0) & (local < columns)
    picked = logits.gather(-1, local.clamp(0, max(columns - 1, 0))[..., None])[..., 0].float() if columns else best
    target = torch.where(mine, picked, low)
    if ranks > 1:
        best, target = max_over(torch.stack([best, target]), group)
    return (target >= best).float()
