"""Tensors of a folder that nothing here computes: a vision tower, heads of multi-token prediction, keys of layers that
use those of others.

Exports of a language model have them as the folder of its first weights had them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError
from aligner.families.within import OWN
from aligner.models.safetensors_io import AHEAD, INDEX, SINGLE, HfTensors, open_hf
from aligner.models.safetensors_stream import DTYPES

_KEYS = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_REPEATED = ("layers", "blocks", "experts")  # modules of equal members, by number


def names_beside(tensors: HfTensors, cfg: ModelConfig) -> list[str]:
    """Return the names of these tensors in a folder."""

    def is_beside(name: str) -> bool:
        layer = _LAYER.match(name)
        carried = cfg.traits.predicts_ahead and not cfg.mtp.layers and not cfg.traits.ahead_apart
        ahead = layer and carried and int(layer[1]) >= cfg.num_layers
        apart = name.startswith("mtp.") and not cfg.mtp.layers
        unused = layer and _KEYS.fullmatch(name) and int(layer[1]) < cfg.num_layers and not cfg.has_keys(int(layer[1]))
        other = tensors.within and not OWN.match(name) and not name.startswith("mtp.")
        return bool(ahead or apart or unused or other)

    return [name for name in tensors if is_beside(name)]


def check_beside(tensors: HfTensors, cfg: ModelConfig, names: list[str]) -> list[str]:
    """Return lines about these tensors, and about heads that config.json announces and the weights lack. Raises
    CheckpointError if some of the tensors are missing: equal members of a module must have the same tensors, as many
    members as config.json says, and the files must have what their index lists. Where layers are single modules of
    several kinds, a head consists of several unlike ones, and only their number is checked."""
    members, places = defaultdict[str, set[int]](set), dict[tuple[str, str], str]()
    for name in names:
        tensors.shape(name)  # raises if its file lacks it
        words = name.split(".")
        for i, number in enumerate(words[1:-1], 1):
            if words[i - 1] in _REPEATED and number.isdigit():
                before, after = ".".join(words[:i]), ".".join(words[i + 1 :])
                members[before].add(int(number))
                places.setdefault((before, after), name)
    for (before, after), name in places.items():
        if before == "mtp.layers" and cfg.traits.single:
            continue
        first = cfg.num_layers if before == "model.layers" else 0
        for number in range(first, max(members[before]) + 1):
            if (wanted := f"{before}.{number}.{after}") not in tensors:
                raise CheckpointError(f"{tensors.where}: the weights have {name}, but no {wanted}: complete it")
    lines, heads = [], any(name.startswith(("mtp.", "model.layers.")) for name in names)
    for key, count in tensors.announced.items():
        ahead, layers = key.endswith(AHEAD), f"{tensors.where}: layers by config.json's {key}: expected {count}"
        if ahead and count and not heads and not cfg.mtp.layers:
            lines.append(f"{layers}, found none: exports have none either")
        own = [len(of) for before, of in members.items() if _stack(before) and before.startswith("mtp.") == ahead]
        if own and max(own) != count:
            raise CheckpointError(f"{layers}, found {max(own)}")
    kinds = sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names})
    carried = f"{tensors.where}: {len(names)} tensors ({', '.join(kinds)}) are not trained; exports have them unchanged"
    return [*lines, carried] if names else lines


def _stack(module: str) -> bool:
    return module.endswith((".layers", ".blocks")) and module != "model.layers"


@dataclass(frozen=True)
class Beside:
    """These tensors of `folder`, the origin of a model; none without an origin, or for a model that scores."""

    folder: Path | None
    tensors: HfTensors = field(default_factory=lambda: HfTensors({}))
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path | None, cfg: ModelConfig, head: str) -> Beside:
        if folder is None or head != "lm" or not any((folder / name).is_file() for name in (SINGLE, INDEX)):
            return cls(folder)
        tensors = open_hf(folder, bool(cfg.mtp.layers))
        return cls(folder, tensors, tuple(names_beside(tensors, cfg)))

    def kind(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in exports: as stored, but `dtype` of float8 with scales, which exports do not have."""
        return dtype if self.tensors.scale_shape(name) is not None else DTYPES[self.tensors.dtype(name)]

    def meta(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.tensors.shape(name), dtype=self.kind(name, dtype), device="meta")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].to(self.kind(name, dtype))
