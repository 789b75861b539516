"""Conversion of a parameter between Megatron's layout and Hugging Face's, whole or as tensor-parallel shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError, LayoutError
from aligner.families.matrices import rows_of_group
from aligner.families.rows import ParamSpec
from aligner.families.table import family_table


def dtype_of(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model of `dtype`."""
    return torch.int64 if spec.integer else torch.float32 if spec.float32 else dtype


def hf_dtypes(table: Iterable[ParamSpec], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each Hugging Face tensor of a model of `dtype`."""
    return {name: dtype_of(spec, dtype) for spec in table for name in spec.hf}


def to_hf(spec: ParamSpec, full: Tensor, cfg: ModelConfig) -> dict[str, Tensor]:
    """Return the Hugging Face tensors (views or copies) of a canonical TP=1 tensor."""
    assert tuple(full.shape) == spec.shape, f"{spec.canonical}: {tuple(full.shape)} is not {spec.shape}"
    if spec.transform == "copy":
        return {spec.hf[0]: full}
    if spec.transform == "gate_up":
        return dict(zip(spec.hf, full.chunk(2, dim=0), strict=True))
    if spec.experts:  # [E, 2, F, H] -> gate and up of every expert; [E, H, F] -> one tensor of every expert
        return dict(zip(spec.hf, full.flatten(0, 1) if spec.transform == "experts_gate_up" else full, strict=True))
    parts = full.unflatten(0, (spec.units, -1)).split(rows_of_group(spec, cfg), dim=1)
    return {name: rows.flatten(0, 1) for name, rows in zip(spec.hf, parts, strict=True)}


def from_hf(spec: ParamSpec, tensors: Mapping[str, Tensor] | Callable[[str], Tensor], cfg: ModelConfig) -> Tensor:
    """Return the canonical TP=1 tensor of Hugging Face tensors (by name).

    Raises CheckpointError naming a tensor that is missing or does not fit the config.
    """
    parts = [tensors(name) if callable(tensors) else _named(tensors, name) for name in spec.hf]
    wanted = to_hf(spec, torch.empty(spec.shape, device="meta"), cfg)
    for name, tensor in zip(spec.hf, parts, strict=True):
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name}: shape {tuple(tensor.shape)}, but the model config says {tuple(wanted[name].shape)}"
            )
    return assemble(spec, parts, cfg)


def assemble(spec: ParamSpec, parts: Sequence[Tensor], cfg: ModelConfig) -> Tensor:
    """Return the canonical tensor, or a tensor-parallel shard of it, from its Hugging Face tensors or their shards."""
    if spec.transform == "copy":
        return parts[0]
    if spec.transform == "gate_up":
        return torch.cat(list(parts))
    if spec.experts:
        stacked = torch.stack(list(parts))
        return stacked.unflatten(0, (-1, spec.shape[1])) if spec.transform == "experts_gate_up" else stacked
    sizes = rows_of_group(spec, cfg)
    return torch.cat([p.unflatten(0, (-1, n)) for p, n in zip(parts, sizes, strict=True)], dim=1).flatten(0, 1)


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the weights hold no tensor {name!r}")
    return tensors[name]


def hf_axis(spec: ParamSpec) -> int | None:
    """Return the axis of Hugging Face tensors along which tensor-parallel shards differ; None if all ranks hold the
    whole."""
    if spec.tp_axis is None or spec.transform == "copy":
        return spec.tp_axis
    return spec.tp_axis - 1 if spec.transform == "experts" else 0


def shard_interval(length: int, tp: int, rank: int) -> tuple[int, int]:
    """Return [start, stop) of `length` entries for tensor-parallel rank `rank`.

    If the length is not divisible (a vocabulary, which Megatron pads), the last ranks have fewer entries, or none.
    """
    size = -(-length // tp)
    return min(length, rank * size), min(length, (rank + 1) * size)


def split_tp(spec: ParamSpec, full: Tensor, tp: int, rank: int) -> Tensor:
    """Return the shard of tensor-parallel rank `rank` of a canonical tensor; the vocabulary is padded with zero
    rows."""
    if spec.tp_axis is None or tp == 1:
        return full
    if spec.padded:
        rows = -(-spec.units // tp) * tp
        full = torch.nn.functional.pad(full, (0, 0, 0, rows - full.shape[0]))
    elif spec.units % tp:
        raise LayoutError("parallel.tensor", tp, f"a divisor of {spec.units} (pieces of {spec.canonical})")
    if spec.transform == "gate_up":  # a shard is [gate rows of the rank; up rows of the rank]
        return full.unflatten(0, (2, -1)).chunk(tp, dim=1)[rank].flatten(0, 1)
    return full.chunk(tp, dim=spec.tp_axis)[rank].contiguous()


def merge_tp(spec: ParamSpec, shards: Sequence[Tensor]) -> Tensor:
    """Return the canonical tensor of the shards of all tensor-parallel ranks, in rank order: the inverse of
    `split_tp`."""
    if spec.tp_axis is None:
        return shards[0]
    if spec.transform == "gate_up":
        return torch.cat([s.unflatten(0, (2, -1)) for s in shards], dim=1).flatten(0, 1)
    full = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=spec.tp_axis)
    return full[: spec.units] if spec.padded else full


def expected_hf_shapes(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face name -> shape of every tensor in a checkpoint of this model."""
    out: dict[str, tuple[int, ...]] = {}
    for spec in family_table(cfg, head, num_labels):
        for name, t in to_hf(spec, torch.empty(spec.shape, device="meta"), cfg).items():
            out[name] = tuple(t.shape)
    return out


def embedding_factor(cfg: ModelConfig, dtype: torch.dtype) -> float:
    """Return the multiplier of embeddings.

    Gemma's authors round the square root of the hidden size to the dtype.
    """
    root = rounded_root(cfg.hidden_size, dtype)
    return (root if cfg.traits.scaled_embeddings else 1.0) * cfg.scales.embedding


def rounded_root(size: int, dtype: torch.dtype) -> float:
    """Return the square root rounded to the dtype."""
    return float(torch.tensor(size**0.5, device="cpu").to(dtype))
