"""The residual streams of the native engine (`ops/kernels/hyper.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligner.engines.native.block_inputs import BlockContext
from aligner.families.table import family_table
from aligner.ops.kernels import hyper
from aligner.ops.kernels.hyper import StreamWeights

_END = "decoder.final_layernorm"


class ResidualStreams:
    """What makes the factors in all layers and at the end of the model, in float32, the same on every rank."""

    def __init__(self, kit: BlockContext):
        self.shape, self.eps, self._views = kit.cfg.hyper, kit.cfg.norm_eps, dict[str, Tensor]()
        self._weights: dict[str, dict[str, Tensor]] = {}
        for spec in family_table(kit.cfg):
            at, _, name = spec.canonical.rpartition(".")
            if at.endswith("_streams") or (at == _END and name != "weight"):
                own = kit.empty(*spec.shape, dtype=torch.float32)
                self._weights.setdefault(at, {})[name] = self._views[spec.hf[0]] = own

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        return self._views

    def read(self, x: Tensor, layer: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return hyper.read(x, StreamWeights(**self._weights[f"decoder.layers.{layer}.{name}"]), self.shape, self.eps)

    def joined(self, x: Tensor) -> Tensor:
        return hyper.joined(x, StreamWeights(**self._weights[_END]), self.shape, self.eps)
