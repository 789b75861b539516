"""The experts that routers chose for tokens of running rows (`NativeEngine.reports_routing`): one slot per row, as
in the cache of their keys and values, which is much larger."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.native.scratch import Scratch
from aligner.ops.packing.routing import routing_dtype


class Routes:
    """The experts' numbers, slots [slot, position, layer, top_k]."""

    def __init__(self, layers: int, top_k: int, num_experts: int, device: torch.device):
        self.layers, self.top_k = layers, top_k
        self._scratch = Scratch(device, routing_dtype(num_experts))
        self.token_bytes = layers * top_k * self._scratch.dtype.itemsize
        self.slots = self.staged = self.empty(0)

    def empty(self, *shape: int) -> Tensor:
        """Return [*shape, layer, top_k] to be filled by a forward pass."""
        shape = (*shape, self.layers, self.top_k)
        return torch.empty(shape, dtype=self._scratch.dtype, device=self._scratch.device)

    @property
    def held_bytes(self) -> int:
        return self._scratch.held_bytes

    def resize(self, slots: int, positions: int) -> None:
        """Shape the slots for one generation."""
        self.slots = self.slots.new_empty(0)
        self.slots = self._scratch.take("slots", slots, positions, self.layers, self.top_k)

    def stage(self, prompts: int, positions: int) -> Tensor:
        """Return space for the routes of prefilled prompts until their rows get slots."""
        self.staged = self.staged.new_empty(0)
        self.staged = self._scratch.take("staged", prompts, positions, self.layers, self.top_k)
        return self.staged

    def admit(self, prompt: int, length: int, first: int, count: int) -> None:
        """Copy the `length` positions of staged prompt `prompt` into slots [first, first + count)."""
        self.slots[first : first + count, :length] = self.staged[prompt, :length]

    def write(self, positions: Tensor, routes: Tensor) -> None:
        """Write routes [n, layer, top_k] of one new token per slot [0, n)."""
        self.slots[torch.arange(len(positions), device=positions.device), positions] = routes

    def take(self, slots: Tensor, fed: Tensor) -> Tensor:
        """Return the routes of `slots` int64 [m] below positions `fed` int64 [m], the others 0: [m, most, layer,
        top_k]. Arguments and result are on the CPU; the host waits for the copy."""
        most = int(fed.max())
        routes = self.slots[slots.to(self.slots.device), :most].cpu()
        routes[torch.arange(most) >= fed[:, None]] = 0
        return routes

    def joined(self, parts: list[tuple[Tensor, Tensor]], rows: int) -> Tensor:
        """Return [rows, tokens of the longest row, layer, top_k] from the results of `take`, each for some rows
        (int64 [m])."""
        width = max((routes.shape[1] + 1 for _, routes in parts), default=0)
        out = torch.zeros(rows, width, self.layers, self.top_k, dtype=self._scratch.dtype)
        for which, routes in parts:
            out[which, : routes.shape[1]] = routes
        return out

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` to slots `target` (int64 [m] each)."""
        self.slots[target, :length] = self.slots[source, :length]

    def release(self) -> None:
        self._scratch.clear()
        self.slots = self.staged = self.slots.new_empty(0)
