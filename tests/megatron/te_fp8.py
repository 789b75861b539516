"""FP8 in the stand-in for TransformerEngine's extension: tensors with one scale, or (MXFP8) one for each 32 numbers.
Products are those of the rounded numbers, and refuse sizes that cuBLAS refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FORMATS = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
BLOCK = 32


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    made = _blocks(x, quantizer) if type(quantizer).__name__ == "MXFP8Quantizer" else _whole(x, quantizer)
    if out is None:
        return made
    out.copy_from_storage(made)
    return out


def create_empty_quantized_tensor(quantizer: Any, shape: list[int], dtype: torch.dtype, *unused: Any) -> Any:
    alone = quantizer.copy()
    alone.with_amax_reduction = False
    return quantize(torch.zeros(shape, dtype=dtype), alone)


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


def fp8_transpose(data: Tensor, kind: Any, out: Tensor | None = None) -> Tensor:
    turned = data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


def _whole(x: Tensor, quantizer: Any) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, Float8TensorStorage

    assert type(quantizer).__name__ == "Float8CurrentScalingQuantizer", type(quantizer)
    kind, largest = FORMATS[int(quantizer.dtype)], x.abs().amax().float()
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = torch.where(largest > 0, torch.finfo(kind).max / largest, 1.0)
    data = (x.float() * scale).to(kind).view(torch.uint8)
    fields = {"data": data if quantizer.rowwise_usage else None, "fp8_scale_inv": (1 / scale).view(1)}
    fields |= {"data_transpose": fp8_transpose(data, None) if quantizer.columnwise_usage else None}
    fields |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=x.dtype, **fields)
    return Float8Tensor(shape=x.shape, dtype=x.dtype, device=x.device, **fields)


def _blocks(x: Tensor, quantizer: Any) -> Any:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor, MXFP8TensorStorage

    kind, flat = FORMATS[int(quantizer.dtype)], x.float().reshape(-1, x.shape[-1])
    assert not flat.shape[0] % BLOCK and not flat.shape[1] % BLOCK, f"MXFP8 takes multiples of {BLOCK}: {x.shape}"
    fields: dict[str, Any] = {}
    for name, wanted, columns in (
        ("rowwise", quantizer.rowwise_usage, False),
        ("columnwise", quantizer.columnwise_usage, True),
    ):
        own = flat.t() if columns else flat
        cells = own.reshape(len(own), -1, BLOCK)
        power = (cells.abs().amax(-1) / torch.finfo(kind).max).log2().ceil().clamp(-127, 127)
        data = (cells * (-power).exp2()[..., None]).to(kind).view(torch.uint8).view(own.shape)
        data, power = (data.t(), power.t()) if columns else (data, power)
        scales = torch.zeros(quantizer.get_scale_shape(x.shape, columns), dtype=torch.uint8)
        scales[: power.shape[0], : power.shape[1]] = (power + 127).to(torch.uint8)
        fields |= {f"{name}_data": data.reshape(x.shape).contiguous() if wanted else None}
        fields |= {f"{name}_scale_inv": scales if wanted else None}
    fields |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "with_gemm_swizzled_scales": False}
    if quantizer.internal:
        return MXFP8TensorStorage(fake_dtype=x.dtype, **fields)
    return MXFP8Tensor(shape=x.shape, dtype=x.dtype, device=x.device, **fields)


def plain(x: Any, rows: bool) -> Tensor:
    """A matrix [-1, K] for a product: of FP8 the numbers of its rows, or of its columns."""
    if not hasattr(x, "_fp8_dtype"):
        return x.reshape(-1, x.shape[-1])
    kind = FORMATS[int(x._fp8_dtype)]
    if hasattr(x, "_scale_inv"):
        data = x._data if rows else x._transpose
        assert data is not None, "not quantised in this direction"
        flat = data.view(kind).float().reshape(-1, data.shape[-1]) if rows else data.view(kind).float().flatten(1)
        flat = (flat if rows else flat.t()) * x._scale_inv
        assert not flat.shape[0] % 8 and not flat.shape[1] % 16, f"FP8 takes multiples of 16: {tuple(flat.shape)}"
        assert rows or not flat.shape[0] % 16, f"FP8 takes multiples of 16: {tuple(flat.shape)}"
        return flat
    data, scales = (x._rowwise_data, x._rowwise_scale_inv) if rows else (x._columnwise_data, x._columnwise_scale_inv)
    assert data is not None, "not quantised in this direction"
    flat = data.view(kind).float().reshape(-1, data.shape[-1])
    scales = (scales.float() - 127).exp2().repeat_interleave(BLOCK, 1 if rows else 0)
    return flat * scales[: flat.shape[0], : flat.shape[1]]


def dequantize(x: Any, kind: Any) -> Tensor:
    rows = (x._data if hasattr(x, "_scale_inv") else x._rowwise_data) is not None
    return plain(x, rows).view(x.size()).to(x._dtype)
