"""Whether each token is the most likely one of its distribution."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.kernels.logprobs import own_columns
from aligner.ops.reduce import max_over


@torch.no_grad()
def greedy_hits(logits: Tensor, targets: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return float32 [N]: 1 where the target has the largest logit of its row (ties count).

    logits [N, V_local], sharded over `group` by columns as in `token_logprobs`; targets int64 [N].
    """
    group, offset, columns = own_columns(logits, vocab_size, group)
    low = torch.finfo(torch.float32).min
    logits = logits[:, :columns]
    best = logits.amax(-1).float() if columns else torch.full(targets.shape, low, device=logits.device)
    local = targets - offset
    here = (local >= 0) & (local < columns)
    picked = logits.gather(-1, local.clamp(0, max(columns - 1, 0))[..., None])[..., 0].float() if columns else best
    target = torch.where(here, picked, low)
    best, target = max_over(torch.stack([best, target]), group)
    return (target >= best).float()
