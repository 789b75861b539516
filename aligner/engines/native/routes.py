"""The experts that routers chose for tokens of running rows (`NativeEngine.reports_routing`): kept beside their keys
and values, which are much larger, as one layer of one head."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.native.cache import SlotCache
from aligner.engines.native.scratch import Scratch
from aligner.ops.packing.routing import routing_dtype


class Routes:
    """The experts' numbers [layer, top_k] of a token, in `cache`."""

    def __init__(self, layers: int, top_k: int, num_experts: int, device: torch.device):
        self.layers, self.top_k = layers, top_k
        self._dtype = routing_dtype(num_experts)
        self.cache = SlotCache(1, 1, layers * top_k, device, self._dtype, 1)

    def empty(self, rows: int) -> Tensor:
        """Return [rows, layer, top_k] to be filled by a forward pass."""
        return self.cache.kv.new_empty(rows, self.layers, self.top_k)

    @property
    def staged(self) -> Tensor:
        """The routes of prefilled prompts until their rows get slots, [prompts, positions, layer, top_k]."""
        return self.cache.staged[0, 0, :, 0].unflatten(-1, (self.layers, self.top_k))

    def take(self, slots: Tensor, fed: Tensor) -> Tensor:
        """Return the routes of `slots` int64 [m] below positions `fed` int64 [m], the others 0: [m, most, layer,
        top_k]. Arguments and result are on the CPU; the host waits for the copy."""
        most, own = int(fed.max()), slots.to(self.cache.kv.device)
        scratch = Scratch(own.device, self._dtype)
        routes = self.cache.read(0, own, most, self.cache.lines(own, most), scratch)[0, :, 0].cpu()
        routes[torch.arange(most) >= fed[:, None]] = 0
        return routes.unflatten(-1, (self.layers, self.top_k))

    def joined(self, parts: list[tuple[Tensor, Tensor]], rows: int) -> Tensor:
        """Return [rows, tokens of the longest row, layer, top_k] from the results of `take`, each for some rows
        (int64 [m]). A row that paused for lack of pages has several: the first is of the steps that made its tokens."""
        width = max((routes.shape[1] + 1 for _, routes in parts), default=0)
        out = torch.zeros(rows, width, self.layers, self.top_k, dtype=self._dtype)
        for which, routes in reversed(parts):
            out[which, : routes.shape[1]] = routes
        return out
