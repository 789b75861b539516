"""The norm of all gradients without Apex or TransformerEngine: Megatron's own way reads that of each tensor from the
device by itself, and the host waits as often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor


def use_one_norm() -> None:
    """In place of Megatron's function where it would take that one, for good: the same numbers, which stay on the
    device."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all


def no_norms_apart(optimizer: MegatronOptimizer) -> None:
    """No parameter here has a norm of its own (as Megatron's of multi-token prediction have). Megatron would ask all
    ranks, once for each optimizer: a pipeline stage whose layers are all dense has one less than a stage with experts,
    which would wait for its answer for ever."""
    optimizer._has_grad_norm_group_cache = dict.fromkeys(SEPARATE_GRAD_NORM_GROUPS, False)


def norm_of_all(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], per_tensor: bool, *unused: Any
) -> tuple[Tensor, None]:
    """float32 [1], of all tensors of all lists; `amp_C.multi_tensor_l2norm`'s signature."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None
