"""A strict stand-in on the CPU for `transformer_engine_torch`, the extension in C++ that TransformerEngine's Python
calls: the operations that 16-bit and 32-bit training needs, in plain torch. It refuses what the real kernels would read
past. Other operations are names that raise when they are called.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from tests.megatron import te_fp8
from tests.megatron.te_buffers import (  # noqa: F401 (of the extension)
    CommOverlap,
    CommOverlapHelper,
    CommOverlapP2P,
    CommOverlapType,
    device_supports_multicast,
    get_stream_priority_range,
)
from tests.megatron.te_fp8 import bgrad_quantize, create_empty_quantized_tensor, dequantize, fp8_transpose, quantize  # noqa: F401 (of the extension)
from tests.megatron.te_rows import Rule, attend, attend_backward


class DType(enum.IntEnum):
    kByte, kInt32, kFloat32, kFloat16, kBFloat16 = 0, 2, 4, 5, 6
    kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = 7, 8, 10


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_No_Backend, NVTE_F16_arbitrary_seqlen, NVTE_FP8 = -1, 1, 2


_FORWARD = [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")]
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _FORWARD, start=0)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _BACKWARD, start=0)
TORCH = {DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16, DType.kFloat16: torch.float16}


class _Names(type):
    """An enumeration of C++ whose members are only compared."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls()
        member.name = name
        type.__setattr__(cls, name, member)
        return member


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        globals()[name] = _Names(name, (), {"__int__": lambda self: len(self.name)})
        return globals()[name]

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not in the stand-in")

    return missing


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 91800  # the first with sinks of packed rows


def get_num_cublas_streams() -> int:
    return 4


def ubuf_built_with_mpi() -> bool:
    return False


# ---- products


def generic_gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad,
                 workspace, workspace_size, accumulate, use_split_accumulator, **options):  # fmt: skip
    """`cuBLAS` counts columns first: D = op(B) @ op(A) of rows."""
    assert quantizer is None and not gelu and not options.get("bulk_overlap")
    if (buffer := options.get("comm_overlap")) is not None and options["comm_type"] == CommOverlapType.AG:
        buffer.gather(getattr(B, "_data", getattr(B, "_rowwise_data", B)))
    a, b = te_fp8.plain(A, transA), te_fp8.plain(B, not transB)
    out = (b.t() if transB else b) @ (a.t() if transA else a)
    shape = out.shape if transB else (*B.size()[:-1], out.shape[-1])
    out = out.view(shape)
    if bias is not None and not grad:
        out = out + bias
    if output_dtype is not None:
        out = out.to(TORCH[DType(int(output_dtype))])
    of_bias = b.sum(0) if grad and bias is not None else None
    if D is not None:
        assert D.shape == out.shape, (D.shape, out.shape)
        out = D.add_(out) if accumulate else D.copy_(out)
    if buffer is not None and options["comm_type"] == CommOverlapType.RS:
        buffer.scatter(out, options["extra_output"])
    return out, of_bias, None, options.get("extra_output")


# ---- norms


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    x = input.float()
    scale = (x.square().mean(-1) + eps).rsqrt()
    out = (x * scale[..., None] * (weight.float() + zero_centered_gamma)).to(TORCH[DType(int(otype))])
    return (out if ln_out is None else ln_out.copy_(out)), None, scale.reshape(-1)


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    g, scale = dz.float().reshape(-1, x.shape[-1]), rsigma[:, None]
    unit = x.float().reshape(g.shape) * scale
    weighted = g * (gamma.float() + zero_centered_gamma)
    dx = (weighted - unit * (weighted * unit).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype).view_as(x), (g * unit).sum(0).to(gamma.dtype)


# ---- attention of rows end to end


def get_fused_attn_backend(*args: Any, **kwargs: Any) -> tuple[int, str]:
    return int(NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen), ""


def _rule(scale: float, mask: Any, window: tuple[int, int], bottom_right: bool) -> Rule:
    assert window[1] == 0 and "PADDING" in mask.name
    return Rule(scale, "CAUSAL" in mask.name, bottom_right, window[0])


def fused_attn_fwd(max_q, max_kv, training, scale, dropout, fill, layout, o_form, scale_form, bias_type, mask, softmax,
                   window, bottom_right, ends_q, ends_kv, q, k, v, dtype, padded_q, padded_kv, *rest):  # fmt: skip
    assert layout.name.count("T") >= 3 and dropout == 0 and padded_q is ends_q and padded_kv is ends_kv, layout.name
    sinks, rule = rest[5], _rule(scale, mask, window, bottom_right)
    out, stats = attend(q, k, v, rule, (ends_q, ends_kv), (max_q, max_kv), sinks)
    return [out, stats, torch.zeros(2, dtype=torch.int64), *([] if sinks is None else [sinks])]


def fused_attn_bwd(max_q, max_kv, scale, dropout, fill, l1, f1, f2, l2, f3, f4, bias_type, mask, softmax, window,
                   bottom_right, exact, ends_q, ends_kv, q, k, v, o, d_o, dtype, kept, padded_q, padded_kv,
                   *rest):  # fmt: skip
    stats, _, *sinks = kept
    rule = _rule(scale, mask, window, bottom_right)
    *grads, of_sinks = attend_backward(q, k, v, o, d_o, stats, rule, (ends_q, ends_kv), *(sinks or [None]))
    return [*grads, None, of_sinks]


# ---- the optimizer


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists, per_tensor=None):
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms[:0]


def multi_tensor_scale(chunk: int, noop: Tensor, lists, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk: int, noop: Tensor, lists, scale: Tensor) -> None:
    multi_tensor_scale(chunk, noop, lists, scale)


def multi_tensor_adam(chunk, noop, lists, lr, beta1, beta2, eps, step, mode, correct, decay) -> None:
    """`mode` 1: the weight decay is not in the gradient. A fifth list has float32 copies of the weights."""
    assert mode == 1
    first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
    for g, p, m, v, *master in zip(*lists, strict=True):
        weight, g = (master[0] if master else p), g.float()
        mean, square = m.float().lerp(g, 1 - beta1), v.float().mul(beta2).addcmul_(g, g, value=1 - beta2)
        update = (mean / first) / ((square / second).sqrt() + eps) + decay * weight
        m.copy_(mean)
        v.copy_(square)
        weight.sub_(lr * update)
        if master:
            p.copy_(weight)
