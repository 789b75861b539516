"""A strict stand-in on the CPU for `transformer_engine_torch`, the extension in C++ that TransformerEngine's Python
calls: the operations that 16-bit and 32-bit training needs, in plain torch. It refuses what the real kernels would read
past. Other operations are names that raise when they are called.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from tests.megatron.te_rows import attend, attend_backward, halves


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
    return 91200


def get_num_cublas_streams() -> int:
    return 4


def ubuf_built_with_mpi() -> bool:
    return False


# ---- products


def generic_gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad,
                 workspace, workspace_size, accumulate, use_split_accumulator, **options):  # fmt: skip
    """`cuBLAS` counts columns first: D = op(B) @ op(A) of rows."""
    assert quantizer is None and not gelu and options.get("comm_overlap") is None
    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    out = (b.t() if transB else b) @ (a.t() if transA else a)
    shape = out.shape if transB else (*B.shape[:-1], out.shape[-1])
    out = out.view(shape)
    if bias is not None and not grad:
        out = out + bias
    if output_dtype is not None:
        out = out.to(TORCH[DType(int(output_dtype))])
    of_bias = b.sum(0) if grad and bias is not None else None
    if D is not None:
        assert D.shape == out.shape, (D.shape, out.shape)
        out = D.add_(out) if accumulate else D.copy_(out)
    return out, of_bias, None, None


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


# ---- rotary embeddings


def _angles(freqs: Tensor, ends: Tensor, size: int, rank: int) -> Tensor:
    """Of each token of this rank's rows; of `size` ranks each has two chunks of every row."""
    parts = []
    for whole in ends.diff().tolist():
        assert whole <= len(freqs), f"the table of {len(freqs)} angles ends before the row of {whole}"
        chunk = whole // (2 * size)
        assert size == 1 or whole == chunk * 2 * size, f"a row of {whole} is not dealt evenly to {size} ranks"
        last = whole - chunk * rank
        parts += [freqs[:whole]] if size == 1 else [freqs[chunk * rank :][:chunk], freqs[last - chunk : last]]
    return torch.cat(parts)[:, 0]


def _turned(t: Tensor, freqs, start, form, interleaved, ends, size, rank, back: bool) -> Tensor:
    assert form.name == "NVTE_THD" and start is None and not interleaved and ends.dtype == torch.int32
    angles = _angles(freqs, ends, size, rank)
    assert len(angles) == len(t), f"rows of {len(angles)} tokens, and {len(t)} are here"
    cos, sin = angles.cos(), angles.sin()
    x = t.float()
    first, second = (x * sin if back else x).chunk(2, -1)
    half = torch.cat([second, -first] if back else [-second, first], -1)
    return (x * cos + (half if back else half * sin)).to(t.dtype)


def fused_rope_forward(t, freqs, start, form, interleaved, ends, size, rank):
    return _turned(t, freqs, start, form, interleaved, ends, size, rank, back=False)


def fused_rope_backward(t, freqs, start, form, interleaved, ends, size, rank):
    return _turned(t, freqs, start, form, interleaved, ends, size, rank, back=True)


# ---- attention of rows end to end


def fused_attn_fwd(max_q, max_kv, training, scale, dropout, fill, layout, o_form, scale_form, bias_type, mask, softmax,
                   window, bottom_right, ends_q, ends_kv, q, k, v, dtype, padded_q, padded_kv, *rest):  # fmt: skip
    assert layout.name.count("T") >= 3 and dropout == 0 and not bottom_right and window[0] == -1, layout.name
    places = [ends_q if padded_q is None else padded_q, ends_kv if padded_kv is None else padded_kv]
    out, stats = attend(q, k, v, scale, [ends_q, ends_kv], places, (max_q, max_kv), "CAUSAL" in mask.name)
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(max_q, max_kv, scale, dropout, fill, l1, f1, f2, l2, f3, f4, bias_type, mask, softmax, window,
                   bottom_right, exact, ends_q, ends_kv, q, k, v, o, d_o, dtype, kept, padded_q, padded_kv,
                   *rest):  # fmt: skip
    places = [ends_q if padded_q is None else padded_q, ends_kv if padded_kv is None else padded_kv]
    causal = "CAUSAL" in mask.name
    grads = attend_backward(q, k, v, o, d_o, kept[0], scale, [ends_q, ends_kv], places, causal)
    return [*grads, None, None]


def thd_read_half_tensor(x: Tensor, ends: Tensor, half: int) -> Tensor:
    return x.index_select(0 if x.dim() == 3 else 1, halves(ends)[half])


def thd_read_second_half_lse(lse: Tensor, ends: Tensor, packed: bool, length: int) -> Tensor:
    assert packed and length >= lse.shape[1] // 2
    return lse[:, halves(ends)[1]]


def thd_second_half_lse_correction(lse: Tensor, step: Tensor, ends: Tensor, packed: bool) -> None:
    assert packed
    second = halves(ends)[1]
    lse[:, second] = torch.logaddexp(lse[:, second], step)


def thd_out_correction(out, step, old, new, lse_step, ends, only_second_half: bool, packed: bool) -> None:
    assert packed and out.dtype == step.dtype
    where = halves(ends)[1] if only_second_half else torch.arange(len(out))
    kept, added = ((a - new[:, where]).exp().t()[..., None] for a in (old[:, where], lse_step))
    out[where] = (out[where] * kept + step.view(len(where), *out.shape[1:]) * added).to(out.dtype)


def thd_grad_correction(grad: Tensor, step: Tensor, ends: Tensor, first: str, second: str) -> None:
    parts = list(zip(halves(ends), (first, second), strict=True))
    taken = [where for where, how in parts if how in ("copy", "add")]
    assert len(step) == sum(map(len, taken))
    for where, how in parts:
        source = step[where] if len(taken) == 2 else step
        if how == "zero":
            grad[where] = 0
        elif how != "none":
            grad[where] = grad[where] + source if how == "add" else source


def _rank_order(ends: Tensor, size: int) -> Tensor:
    """The tokens of rank 0, then of rank 1, ...: of each row its chunks i and 2 size - 1 - i."""
    order = []
    for rank in range(size):
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            chunks = torch.arange(begin, end).view(2 * size, -1)
            order += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(order)


def thd_sequence_order_to_cp_rank_order(x: Tensor, ends: Tensor, size: int, tokens: int) -> Tensor:
    return x[_rank_order(ends, size)]


def thd_cp_rank_order_to_sequence_order(x: Tensor, ends: Tensor, size: int, tokens: int) -> Tensor:
    return torch.empty_like(x).index_copy_(0, _rank_order(ends, size), x)


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
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m / first) / ((v / second).sqrt() + eps) + decay * weight
        weight.sub_(lr * update)
        if master:
            p.copy_(weight)
