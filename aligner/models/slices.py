"""Which part of a Hugging Face tensor a shard of a canonical tensor is made of. A rank reads those bytes and no others.

Driven by the rows of `families.py`: no family is named here.
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
    """Piece `rank` of `tensor` along a parameter's tensor-parallel axis, of experts [first, first + count)."""

    tensor: int = 1
    rank: int = 0
    first: int = 0
    count: int = 0  # 0: all


WHOLE = Shard()


def of_experts(spec: ParamSpec, shard: Shard) -> ParamSpec:
    """The row of these experts alone."""
    if not spec.experts or not shard.count:
        return spec
    each = len(spec.hf) // spec.shape[0]
    names = spec.hf[shard.first * each : (shard.first + shard.count) * each]
    return replace(spec, hf=names, shape=(shard.count, *spec.shape[1:]))


def read_shard(spec: ParamSpec, tensors: HfTensors, cfg: ModelConfig, shard: Shard = WHOLE) -> Tensor:
    """The canonical tensor's shard, as `split_tp(spec, from_hf(spec, ...), shard.tensor, shard.rank)` has it.

    Raises CheckpointError naming a tensor that is absent or does not fit the config, LayoutError if it cannot be split.
    """
    spec = of_experts(spec, shard)
    axis, pieces = hf_axis(spec), shard.tensor
    if axis is not None and not spec.padded and spec.units % pieces:
        raise LayoutError("parallel.tensor", pieces, f"a divisor of {spec.units} (pieces of {spec.canonical})")
    parts = []
    for name, like in to_hf(spec, torch.empty(spec.shape, device="meta"), cfg).items():
        found = tensors.shape(name)
        if found != tuple(like.shape):
            raise CheckpointError(f"{name}: shape {found}, but the model config says {tuple(like.shape)}")
        if axis is None or pieces == 1:
            parts.append(tensors[name])
            continue
        size = like.shape[axis]
        step = -(-size // pieces)
        part = tensors.part(name, axis, *shard_interval(size, pieces, shard.rank))
        if part.shape[axis] < step:  # the vocabulary is padded with zero rows
            part = torch.cat([part, part.new_zeros(step - part.shape[axis], *part.shape[1:])])
        parts.append(part)
    return assemble(spec, parts, cfg)


class HfSource:
    """Weights for `load_weights`, from the files of a folder: whole tensors, or a rank's shards of them. No file is
    opened before the first of them is asked for: ranks that other ranks tell their weights never do."""

    def __init__(self, opened: Callable[[], HfTensors], cfg: ModelConfig):
        self._opened, self.cfg = opened, cfg

    @cached_property
    def tensors(self) -> HfTensors:
        return self._opened()

    def __call__(self, spec: ParamSpec) -> Tensor:
        return self.shard(spec, WHOLE)

    def shard(self, spec: ParamSpec, shard: Shard) -> Tensor:
        """A score head that the folder lacks starts at zero."""
        if spec.hf == ("score.weight",) and "score.weight" not in self.tensors:
            return torch.zeros(spec.shape)
        return read_shard(spec, self.tensors, self.cfg, shard)


def placed(spec: ParamSpec, part: Tensor, shard: Shard) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets in the canonical tensor, contiguous block) of what `read_shard` gave; vocabulary padding cut off."""
    offsets = [0] * part.dim()
    if spec.experts:
        offsets[0] = shard.first
    if spec.tp_axis is None or shard.tensor == 1:
        return [(tuple(offsets), part)]
    if spec.transform == "gate_up":
        gate, up = part.chunk(2)
        rest = (0,) * (part.dim() - 1)
        return [((half * spec.units + shard.rank * len(gate), *rest), x) for half, x in enumerate((gate, up))]
    offsets[spec.tp_axis] = shard.rank * part.shape[spec.tp_axis]
    if spec.padded:
        part = part[: max(0, spec.units - offsets[0])]
        return [(tuple(offsets), part)] if len(part) else []
    return [(tuple(offsets), part.contiguous())]
