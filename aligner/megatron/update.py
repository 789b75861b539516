"""The step from the last gradient to the new weights, without Apex or TransformerEngine. Megatron reads the norm of
each tensor separately from the device, writes the scaled gradients twice, and copies what has nowhere to go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor


@functools.cache
def use_few_passes() -> None:
    """Replace Megatron's own functions, where it would use those, for good. The numbers stay the same. Idempotent."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_all
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


def know_norms_apart(optimizer: MegatronOptimizer, apart: bool) -> None:
    """Note whether some parameters have a norm `apart` (those of multi-token prediction). Megatron would ask all ranks,
    once for each optimizer. A pipeline stage whose layers are all dense has one less than a stage with experts, which
    would wait for ever."""
    optimizer._has_grad_norm_group_cache = dict.fromkeys(SEPARATE_GRAD_NORM_GROUPS, apart)


def norm_of_all(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], per_tensor: bool, *unused: Any
) -> tuple[Tensor, None]:
    """Return the norm, float32 [1], of all tensors of all lists; `amp_C.multi_tensor_l2norm`'s signature."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale_all(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float) -> None:
    """Write the tensors of the first list times `scale` into those of the second; `amp_C.multi_tensor_scale`'s
    signature."""
    source, target = tensor_lists
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    if target:  # a rank may own nothing of a model
        torch._foreach_mul_(target, scale)


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a collective of the distributed optimizer where a group has one rank. Its shard of a buffer is then a view
    of all of it, and gloo would copy it to itself (three times in a step)."""

    @functools.wraps(collective)
    def call(output: Tensor, input_: Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == input_.data_ptr():
            return None
        return collective(output, input_, *args, group=group, **kwargs)

    return call
