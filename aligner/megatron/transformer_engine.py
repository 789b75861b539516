"""Whether this process has TransformerEngine, and its attention. Megatron imports it wherever it is installed, and
fails with one that does not load. So it is imported before Megatron, and hidden if that fails."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner import loading
from aligner.config.sections.model.config import ModelConfig
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.ops.packing.ragged import Ragged

NAME, EXTENSION = "transformer_engine", "transformer_engine_torch"


@dataclass
class Availability:
    lacks: str = ""  # why it is not used; empty: it is
    broken: bool = False  # installed, on a GPU, and of no use


TE = Availability("Megatron is not imported yet")


def load(megatron: Callable[[], None]) -> None:
    """Call `megatron`, which imports it, with TransformerEngine; without it if that fails."""
    settle(loading.kernels)
    try:
        megatron()
    except Exception as error:
        if TE.lacks:
            raise
        _hide(Availability(f"Megatron-Core does not load with it: {_words(error)}", broken=True), "megatron")
        megatron()


def settle(kernels: str) -> None:
    """Import it, or hide it, by `model.kernels`."""
    if kernels == "own":
        _hide(Availability("model.kernels=own"))
    elif importlib.util.find_spec(NAME) is None:
        _hide(Availability("it is not installed"))
    elif not torch.cuda.is_available():
        _hide(Availability("there is no GPU"))
    else:
        try:
            importlib.import_module(f"{NAME}.pytorch")  # which its own __init__ leaves out if it fails
        except Exception as error:
            _hide(Availability(f"it does not import: {_words(error)}", broken=True))
        else:
            _note(Availability())


def _note(availability: Availability) -> None:
    TE.lacks, TE.broken = availability.lacks, availability.broken


def _hide(availability: Availability, *also: str) -> None:
    """Hide it from Megatron, transformers and all others, and remove what a failed import has left."""
    _note(availability)
    for name in [name for name in sys.modules if name.split(".")[0] in (NAME, EXTENSION, *also)]:
        del sys.modules[name]
    sys.modules[NAME] = None  # type: ignore[assignment]  # an import then fails, and find_spec says None


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# ---- attention


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Ragged, scores: ScoreRule) -> Tensor:
    """Compute attention of rows of any length, for `varlen.attend`."""
    widths, kind = (query.shape[2], value.shape[2]), "vanilla" if scores.sinks is None else "learnable"
    core = _attention(query.shape[1], key.shape[1], widths, scores.scale, kind)
    if scores.sinks is not None:
        core.softmax_offset = scores.sinks.view(-1)  # a plain tensor: a parameter would become the module's
    ends = {"cu_seqlens_q": rows.cu_q, "cu_seqlens_kv": rows.cu_k, "window_size": rows.sight}
    mask = "padding_causal" if rows.k_index is None else "padding_causal_bottom_right"
    out = core(query, key, value, attn_mask_type=mask, max_seqlen_q=rows.max_q, max_seqlen_kv=rows.max_k, **ends)
    return out.view(*query.shape[:2], -1)


def unfused(cfg: ModelConfig) -> str:
    """Return why there is no fused attention for the model here; "" if there is. Any other keeps all scores."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams, get_attention_backend

    # an odd length: some versions of cuDNN take multiples of 64 only
    asked = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "num_tokens_q", "num_tokens_kv"), 4001)
    asked |= {"num_heads": cfg.num_heads, "head_dim_qk": cfg.kv_channels, "head_dim_v": cfg.value_channels}
    if cfg.attention.global_head_dim > cfg.kv_channels:
        asked |= dict.fromkeys(("head_dim_qk", "head_dim_v"), cfg.attention.global_head_dim)
    asked |= {"num_gqa_groups": cfg.num_kv_heads, "window_size": (cfg.attention.window - 1, 0)}
    asked |= {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal_bottom_right", "batch_size": 64}
    asked |= {"core_attention_bias_requires_grad": False}
    exact, kind = torch.are_deterministic_algorithms_enabled(), "learnable" if cfg.traits.sinks else "vanilla"
    known = {name: x for name, x in asked.items() if name in AttentionParams.__dataclass_fields__}  # by this version
    flash, _, fused, *_ = get_attention_backend(AttentionParams(deterministic=exact, softmax_type=kind, **known))
    return "" if flash or fused else "neither cuDNN nor FlashAttention computes it here"


def lacks_buffers() -> str:
    """Return why there are no user buffers here; "" if there are."""
    return TE.lacks


def lacks_fp8(recipe: str) -> str:
    """Return why there are no FP8 products by this recipe here; "" if there are."""
    if TE.lacks:
        return TE.lacks
    from transformer_engine import pytorch

    names = {"tensorwise": "is_fp8_available", "blockwise": "is_fp8_block_scaling_available"}
    able, reason = getattr(pytorch, names.get(recipe, "is_mxfp8_available"))(return_reason=True)
    return "" if able else reason


@functools.cache
def _attention(heads: int, groups: int, widths: tuple[int, int], scale: float | None, kind: str) -> Any:
    """Return TransformerEngine's module, without the sinks that it makes for itself."""
    from transformer_engine.pytorch import DotProductAttention

    core = DotProductAttention(heads, widths, groups, qkv_format="thd", softmax_scale=scale, softmax_type=kind)
    core._parameters.pop("softmax_offset", None)
    return core
