"""Attention of the whole stream in one call of a kernel for rows of any length, where `attention.py` computes segments
of padded rows with masks. CUDA only: TransformerEngine's (`transformer_engine.py`), or with `model.varlen_attention`
torch's FlashAttention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import unfit_for_varlen
from aligner.errors import ConfigError
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.ops.kernels.spread import spread
from aligner.ops.packing.ragged import Ragged

CAPABILITY = (8, 0)  # of the kernels that torch brings


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Ragged, scores: ScoreRule, kernel: Callable) -> Tensor:
    """Compute attention by `kernel`: query [queries, heads, d], key [keys, kv_heads, d], value [keys, kv_heads, e] ->
    [queries, heads, e]."""
    if rows.order is not None:
        query = spread(query, rows.order, rows.back)
    if rows.k_index is not None:
        key, value = key.index_select(0, rows.k_index), value.index_select(0, rows.k_index)
    elif rows.order is not None:
        key, value = (spread(x, rows.order, rows.back) for x in (key, value))
    out = kernel(query.contiguous(), key.contiguous(), value.contiguous(), rows, scores)
    return out if rows.order is None else spread(out, rows.back, rows.order)


def flash(query: Tensor, key: Tensor, value: Tensor, rows: Ragged, scores: ScoreRule) -> Tensor:
    """Call torch's kernel. `is_used` refuses what it cannot do."""
    from torch.nn.attention.varlen import varlen_attn

    ends = rows.cu_q, rows.cu_k, rows.max_q, rows.max_k
    grouped = _grouped(query.shape[1] != key.shape[1])
    return varlen_attn(query, key, value, *ends, scale=scores.scale, window_size=rows.sight, **grouped)


@functools.cache
def _grouped(fewer_keys: bool) -> dict[str, bool]:
    """Return the option for fewer key heads than query heads. Versions of torch without the option always accept
    them."""
    from torch.nn.attention.varlen import varlen_attn

    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": fewer_keys} if asked else {}


def is_used(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `model.varlen_attention` is on. auto: where the kernel supports device and model. Raises
    ConfigError for a true one elsewhere."""
    reason = cfg.varlen_attention and (_unfit_device(device) or unfit_for_varlen(cfg))
    if cfg.varlen_attention and not reason and dtype not in (torch.bfloat16, torch.float16):
        reason = f"it computes in 16 bits, and the model is {str(dtype).removeprefix('torch.')} (model.dtype)"
    if reason and cfg.varlen_attention is True:
        raise ConfigError("model.varlen_attention", True, f"false or auto: {reason}")
    return bool(cfg.varlen_attention) and not reason


def _unfit_device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < CAPABILITY:
        return f"it needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this GPU has {major}.{minor}"
    return ""
