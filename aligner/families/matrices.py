"""The matrices of a layer, which adapters extend."""

from __future__ import annotations

from math import prod
from typing import Literal

from aligner.config.sections.model.config import ModelConfig
from aligner.families.rows import ParamSpec

Split = Literal["out", "in", "none"]  # of a matrix over tensor ranks
_NEVER = ("mlp.router.weight", "mlp.shared_experts.gate_weight", "conv1d.weight", "linear_o_down_proj.weight")


def is_matrix(spec: ParamSpec) -> bool:
    """Return whether a row is a matrix of a layer that may have adapters: no router, no convolution, no indexer, no
    matrix of each group of heads."""
    name = spec.canonical
    matrix = len(spec.shape) == 2 or name.endswith((".experts.gate_up", ".experts.down"))
    never = spec.frozen or spec.float32 or name.endswith((".bias", *_NEVER))
    return name.startswith("decoder.layers.") and matrix and not never


def split_of(spec: ParamSpec) -> Split:
    if spec.tp_axis is None:
        return "none"
    return "in" if spec.tp_axis == len(spec.shape) - 1 else "out"


def sizes_of(spec: ParamSpec) -> tuple[int, int]:
    """Return (out, in) of the matrix, or of each expert's."""
    *out, inner = spec.shape[1:] if spec.experts else spec.shape
    return prod(out), inner


def outs_of(spec: ParamSpec, cfg: ModelConfig) -> list[int]:
    """Return rows of each of Hugging Face's matrices that form it, or each expert's."""
    if spec.transform in ("qkv", "linear_in"):
        return [spec.units * rows for rows in rows_of_group(spec, cfg)]
    out, _ = sizes_of(spec)
    if spec.transform == "experts_gate_up":
        return [out // spec.shape[1]] * spec.shape[1]
    return [out // 2] * 2 if spec.transform == "gate_up" else [out]


def rows_of_group(spec: ParamSpec, cfg: ModelConfig) -> list[int]:
    """Return rows of each Hugging Face tensor in a group of the canonical one, which interleaves them.

    Megatron has [queries of the group, key, value], group after group, or no value. For linear attention a group is a
    key head. Queries alternate with their gates. A group of Mamba-2 is [query, key, inputs, gates, steps].
    """
    if spec.transform == "linear_in":
        each = cfg.linear.parts
        return each if len(spec.hf) == len(each) else [sum(each[:4]), sum(each[4:])]
    queries, others = cfg.query_heads // spec.units, len(spec.hf) - 1
    head = spec.shape[0] // spec.units // (queries + others)
    return [queries * head, *[head] * others]
