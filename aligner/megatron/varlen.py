"""`model.varlen_attention`: attention of the whole stream in one call of torch's FlashAttention for rows of any length,
where `attention.py` computes segments of padded rows with masks. CUDA only."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.ops.kernels.spread import spread
from aligner.ops.packing.ragged import Ragged

OPTIONS = {"scale", "window_size"}  # not every version of torch's function has them
CAPABILITY = (8, 0)  # of the kernels that torch brings
LARGEST_HEAD = 256


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Ragged, scale: float | None) -> Tensor:
    """Compute attention: query [queries, heads, d], key and value [keys, kv_heads, d] -> [queries, heads, d]."""
    from torch.nn.attention.varlen import varlen_attn

    if rows.order is not None:
        query = spread(query, rows.order, rows.back)
    if rows.k_index is not None:
        key, value = key.index_select(0, rows.k_index), value.index_select(0, rows.k_index)
    elif rows.order is not None:
        key, value = (spread(x, rows.order, rows.back) for x in (key, value))
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        rows.cu_q,
        rows.cu_k,
        rows.max_q,
        rows.max_k,
        scale=scale,
        window_size=rows.sight,
        **_grouped(query.shape[1] != key.shape[1]),
    )
    return out if rows.order is None else spread(out, rows.back, rows.order)


@functools.cache
def _grouped(fewer_keys: bool) -> dict[str, bool]:
    """Return the option for fewer key heads than query heads. Versions of torch without the option always accept
    them."""
    from torch.nn.attention.varlen import varlen_attn

    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": fewer_keys} if asked else {}


def check(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the kernel exists and accepts this model. Raises ConfigError."""
    reason = _missing(device) or _refused(cfg, dtype)
    if reason:
        raise ConfigError("model.varlen_attention", True, f"false: {reason}")


def _missing(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < CAPABILITY:
        return f"it needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this GPU has {major}.{minor}"
    return _missing_in_torch()


def _missing_in_torch() -> str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    lacks = OPTIONS - inspect.signature(varlen_attn).parameters.keys()
    return f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(lacks))}" if lacks else ""


def _refused(cfg: ModelConfig, dtype: torch.dtype) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is {str(dtype).removeprefix('torch.')} (model.dtype)"
    if cfg.attention.softcap:
        return f"it does not cap scores, and these are capped (model.attention.softcap={cfg.attention.softcap:g})"
    if cfg.linear.key_heads:
        return f"linear attention takes rows that are padded, which model.family={cfg.family} has"
    if cfg.traits.sinks:
        return f"it does not support attention sinks, which model.family={cfg.family} has"
    if cfg.latent.kv_rank:
        return "it takes keys and values of one width, and those of latent attention have two (model.latent)"
    if cfg.kv_channels % 8 or cfg.kv_channels > LARGEST_HEAD:
        return f"it takes heads of a multiple of 8 up to {LARGEST_HEAD} numbers, and these have {cfg.kv_channels}"
    return ""
