"""What the native engine keeps of a row of any length: not one entry for each position."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aligner.engines.native.scratch import Scratch


class RowStates:
    """The memories of rows, in float32: of each kind [layer, slot, ...]. Those of running rows, and of prompts that
    wait for slots."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        """Make them of each kind's number of layers, and shape in one."""
        self.shapes = shapes
        self.row_bytes = 4 * sum(map(math.prod, shapes.values()))
        self._scratch = Scratch(device, torch.float32)
        self._forget()

    @property
    def held_bytes(self) -> int:
        return self._scratch.held_bytes

    def needs(self, slots: int, prompts: int) -> int:
        """Return the bytes of so many rows and waiting prompts, including the memory that is held already."""
        wanted = {"slots": slots, "staged": prompts}
        per = {kind: math.prod(shape) for kind, shape in self.shapes.items()}
        held = self._scratch.size
        return 4 * sum(max(n * size, held(f"{k} of {w}")) for w, n in wanted.items() for k, size in per.items())

    def resize(self, slots: int) -> None:
        self.slots = ()
        self.slots = self._take("slots", slots)

    def stage(self, prompts: int) -> None:
        self.staged = ()
        self.staged = self._take("staged", prompts)

    def _take(self, where: str, rows: int) -> tuple[Tensor, ...]:
        shapes = self.shapes.items()
        return tuple(self._scratch.take(f"{k} of {where}", layers, rows, *shape) for k, (layers, *shape) in shapes)

    def admit(self, prompt: int, first: int, count: int) -> None:
        """Copy staged prompt `prompt` into slots [first, first + count)."""
        for slots, staged in zip(self.slots, self.staged, strict=True):
            slots[:, first : first + count].copy_(staged[:, prompt : prompt + 1])

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target` (int64 [m] each)."""
        for slots in self.slots:
            slots[:, target] = slots[:, source]

    def release(self) -> None:
        self._scratch.clear()
        self._forget()

    def _forget(self) -> None:
        self.slots: tuple[Tensor, ...] = ()
        self.staged: tuple[Tensor, ...] = ()
