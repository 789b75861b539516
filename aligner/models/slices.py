"""The slices of Hugging Face tensors that form a shard of a canonical tensor. A rank reads only those bytes.

Driven by the rows of `families/table.py`: no family is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError, LayoutError
from aligner.models.params import ParamSpec, assemble, hf_axis, shard_interval, to_hf
from aligner.models.safetensors_io import HfTensors


@dataclass(frozen=True)
class Shard:
    """Shard `rank` of `tensor` along a parameter's tensor-parallel axis, of experts [first, first + count)."""

    tensor: int = 1
    rank: int = 0
    first: int = 0
    count: int = 0  # 0: all


WHOLE = Shard()


def of_experts(spec: ParamSpec, shard: Shard) -> ParamSpec:
    """Return the row restricted to the shard's experts."""
    if not spec.experts or not shard.count:
        return spec
    each = len(spec.hf) // spec.shape[0]
    names = spec.hf[shard.first * each : (shard.first + shard.count) * each]
    return replace(spec, hf=names, shape=(shard.count, *spec.shape[1:]))


def read_shard(spec: ParamSpec, tensors: HfTensors, cfg: ModelConfig, shard: Shard = WHOLE) -> Tensor:
    """Read the canonical tensor's shard, equal to `split_tp(spec, from_hf(spec, ...), shard.tensor, shard.rank)`.

    Raises CheckpointError naming a tensor that is missing or does not fit the config, LayoutError for an unequal split.
    """
    spec = of_experts(spec, shard)
    axis, pieces = hf_axis(spec), shard.tensor
    if axis is not None and not spec.padded and spec.units % pieces:
        raise LayoutError("parallel.tensor", pieces, f"a divisor of {spec.units} (pieces of {spec.canonical})")
    parts = []
    for name, like in to_hf(spec, torch.empty(spec.shape, device="meta"), cfg).items():
        stored_shape = tensors.shape(name)
        if stored_shape != tuple(like.shape):
            raise CheckpointError(f"{name}: shape {stored_shape}, but the model config says {tuple(like.shape)}")
        if axis is None or pieces == 1:
            parts.append(tensors[name])
            continue
        size = like.shape[axis]
        step = -(-size // pieces)
        rows = tensors.read(name, axis, *shard_interval(size, pieces, shard.rank))
        if rows.shape[axis] < step:  # the vocabulary is padded with zero rows
            rows = torch.cat([rows, rows.new_zeros(step - rows.shape[axis], *rows.shape[1:])])
        parts.append(rows)
    return assemble(spec, parts, cfg)


class HfSource:
    """Weights for `load_weights` from the files of a folder: whole tensors, or a rank's shards of them.

    Files are opened on first access: ranks that receive their weights from other ranks open none.
    """

    def __init__(self, opened: Callable[[], HfTensors], cfg: ModelConfig):
        self._opened, self.cfg = opened, cfg

    @cached_property
    def tensors(self) -> HfTensors:
        return self._opened()

    def __call__(self, spec: ParamSpec) -> Tensor:
        return self.shard(spec, WHOLE)

    def shard(self, spec: ParamSpec, shard: Shard) -> Tensor:
        """Read a shard. A score head that the folder lacks starts at zero."""
        if spec.hf == ("score.weight",) and "score.weight" not in self.tensors:
            return torch.zeros(spec.shape)
        return read_shard(spec, self.tensors, self.cfg, shard)


def placed(spec: ParamSpec, block: Tensor, shard: Shard) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (offsets in the canonical tensor, contiguous block) of `read_shard`'s result; vocabulary padding is cut
    off."""
    offsets = [0] * block.dim()
    if spec.experts:
        offsets[0] = shard.first
    if spec.tp_axis is None or shard.tensor == 1:
        return [(tuple(offsets), block)]
    if spec.transform == "gate_up":
        gate, up = block.chunk(2)
        rest = (0,) * (block.dim() - 1)
        return [((half * spec.units + shard.rank * len(gate), *rest), x) for half, x in enumerate((gate, up))]
    offsets[spec.tp_axis] = shard.rank * block.shape[spec.tp_axis]
    if spec.padded:
        block = block[: max(0, spec.units - offsets[0])]
        return [(tuple(offsets), block)] if len(block) else []
    return [(tuple(offsets), block.contiguous())]
