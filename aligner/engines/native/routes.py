"""Where routers sent the tokens of running rows (`NativeEngine.reports_routing`): one slot per row, as in the cache of
their keys and values, beside which this is small."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.native.scratch import Scratch
from aligner.ops.packing.routing import routing_dtype


class Routes:
    """slots [slot, position, layer, top_k]: numbers of experts."""

    def __init__(self, layers: int, top_k: int, num_experts: int, device: torch.device):
        self.layers, self.top_k = layers, top_k
        self._scratch = Scratch(device, routing_dtype(num_experts))
        self.token_bytes = layers * top_k * self._scratch.dtype.itemsize
        self.slots = self.staged = self.empty(0)

    def empty(self, *shape: int) -> Tensor:
        """[*shape, layer, top_k] to be filled by a forward pass."""
        shape = (*shape, self.layers, self.top_k)
        return torch.empty(shape, dtype=self._scratch.dtype, device=self._scratch.device)

    @property
    def held_bytes(self) -> int:
        return self._scratch.held_bytes

    def resize(self, slots: int, positions: int) -> None:
        """Shape it for one generation."""
        self.slots = self.slots.new_empty(0)
        self.slots = self._scratch.take("slots", slots, positions, self.layers, self.top_k)

    def stage(self, prompts: int, positions: int) -> Tensor:
        """Room for the routes of prefilled prompts until their rows get slots."""
        self.staged = self.staged.new_empty(0)
        self.staged = self._scratch.take("staged", prompts, positions, self.layers, self.top_k)
        return self.staged

    def admit(self, prompt: int, length: int, first: int, count: int) -> None:
        """Copy the `length` positions of staged prompt `prompt` into slots [first, first + count)."""
        self.slots[first : first + count, :length] = self.staged[prompt, :length]

    def write(self, positions: Tensor, routes: Tensor) -> None:
        """routes [n, layer, top_k] of one new token per slot [0, n)."""
        self.slots[torch.arange(len(positions), device=positions.device), positions] = routes

    def take(self, slots: Tensor, fed: Tensor) -> Tensor:
        """On the CPU, of `slots` int64 [m] the positions below `fed` int64 [m], the others 0: [m, most, layer, top_k].
        Both are on the CPU; the host waits for the copy."""
        most = int(fed.max())
        found = self.slots[slots.to(self.slots.device), :most].cpu()
        found[torch.arange(most) >= fed[:, None]] = 0
        return found

    def joined(self, parts: list[tuple[Tensor, Tensor]], rows: int) -> Tensor:
        """[rows, tokens of the longest row, layer, top_k] of what `take` gave, each for some rows (int64 [m])."""
        width = max((found.shape[1] + 1 for _, found in parts), default=0)
        out = torch.zeros(rows, width, self.layers, self.top_k, dtype=self._scratch.dtype)
        for which, found in parts:
            out[which, : found.shape[1]] = found
        return out

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Slots `source` -> slots `target` (int64 [m] each), the first `length` positions."""
        self.slots[target, :length] = self.slots[source, :length]

    def release(self) -> None:
        self._scratch.clear()
        self.slots = self.staged = self.slots.new_empty(0)
