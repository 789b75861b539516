"""The kernel that `scaled_dot_product_attention` takes, by the rules of torch 2.13 for CUDA (sm80 and newer, without
cuDNN). Torch itself looks at the device in C++, and would take the slow one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.bias as bias_module
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from aligner.rehearse.device import RehearsedDevice, on_device
from aligner.rehearse.record import source_line

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MASK_UNIT = 16  # elements that a row of the efficient kernel's mask is padded to


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    uneven = causal and q.shape[-2] != k.shape[-2]
    return mask is None and q.dtype in HALVES and q.shape[-1] <= LARGEST_HEAD and not uneven


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    unit = 4 if q.dtype == torch.float32 else 8
    same = q.shape[1] == k.shape[1] == v.shape[1]
    return same and q.dtype in (*HALVES, torch.float32) and q.shape[-1] % unit == 0 and v.shape[-1] % unit == 0


def install(device: RehearsedDevice) -> None:
    original = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        # fewer queries than keys: without a device torch has no backward of its call, and counts its operations wrongly
        late = isinstance(attn_mask, bias_module.CausalBias) and not _flash(query, key, value, None, False)
        if late and on_device(query) and _efficient(query, key, value):
            attn_mask, is_causal = None, True
        if isinstance(attn_mask, bias_module.CausalBias) or not any(map(on_device, (query, key, value))):
            return original(query, key, value, attn_mask=attn_mask, **options)
        for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
            if tensor is not None and not on_device(tensor):
                raise RuntimeError(f"attention on cuda, and its {name} is on the CPU")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise RuntimeError(f"{query.shape[1]} heads and {key.shape[1]} of keys, without enable_gqa")
        kernels = device.record.phase.attention
        if _flash(query, key, value, attn_mask, is_causal):
            kernels["flash", source_line(2)] += 1
            run = aten._scaled_dot_product_flash_attention
            return run(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if _efficient(query, key, value):
            kernels["efficient", source_line(2)] += 1
            bias = None if attn_mask is None else _padded(attn_mask, query, key)
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            run = aten._scaled_dot_product_efficient_attention
            return run(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)[0]
        kernels["math", source_line(2)] += 1
        return original(query, key, value, attn_mask=attn_mask, **options)

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    torch._C._nn.scaled_dot_product_attention = attend
    lower_right = bias_module.causal_lower_right

    def causal_lower_right(*shape: int) -> Any:
        with _disable_current_modes():
            return lower_right(*shape)

    bias_module.causal_lower_right = causal_lower_right
    bias_module.SDPAParams = lambda *params: params  # (query, key, value, mask, dropout, causal, gqa)
    bias_module.can_use_flash_attention = lambda p, debug=False: _flash(*p[:4], p[5])
    bias_module.can_use_efficient_attention = lambda p, debug=False: _efficient(*p[:3])
    bias_module._raise_kernel_warnings = lambda params: None


def _padded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as torch passes it to the efficient kernel."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    width = mask.shape[-1]
    if width % MASK_UNIT:
        mask = F.pad(mask, (0, MASK_UNIT - width % MASK_UNIT))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
