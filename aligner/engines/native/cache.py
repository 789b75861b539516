"""The KV cache: one slot per row, active rows first.

Decoding always runs on slots [0, n), so no step gathers; when a row finishes, the last active row moves into its slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.native.scratch import Scratch
from aligner.engines.native.states import RowStates


class SlotCache:
    """The KV cache [layer, plane, slot, kv_head, position, head_dim]. The two planes are keys and values. Latent
    attention has one plane of one head, from which keys and values are computed. `memories`: of layers without
    attention. `beside`: the cache of other layers, whose heads are of another number or width."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        planes: int = 2,
        memories: RowStates | None = None,
        beside: SlotCache | None = None,
    ):
        self.memories, self.beside = memories, beside
        self.layers, self.planes, self.kv_heads, self.head_dim = layers, planes, kv_heads, head_dim
        self._own_bytes = layers * planes * kv_heads * head_dim * torch.empty((), dtype=dtype).element_size()
        self._scratch = Scratch(device, dtype)
        self.kv = self.staged = torch.empty(0, dtype=dtype, device=device)

    @property
    def kinds(self) -> tuple[SlotCache, ...]:
        """This cache, and the one beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def token_bytes(self) -> int:
        return sum(each._own_bytes for each in self.kinds)

    @property
    def held_bytes(self) -> int:
        held = sum(each._scratch.held_bytes for each in self.kinds)
        return held + (self.memories.held_bytes if self.memories else 0)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row that do not depend on its length."""
        return self.memories.row_bytes if self.memories else 0

    def resize(
        self, slots: int, positions: int, staged: int = 0, budget_bytes: int = 1 << 62, prompts: int = 0
    ) -> None:
        """Shape the cache for one generation. At most `staged` positions of prompts wait for slots, of at most
        `prompts` prompts where there are memories.

        Memory is kept between generations and grows when it must, but never beyond the budget: an earlier
        generation's memory for slots may not add up with this one's for prompts.
        """
        wanted = {"slots": slots * positions, "staged": staged}
        total = sum(each._needs(wanted) for each in self.kinds)
        self._let_go()  # or what is replaced would live until its successor does
        if total + (self.memories.needs(slots, prompts) if self.memories else 0) > budget_bytes:
            self.release()
        if self.memories:
            self.memories.resize(slots)
        for each in self.kinds:
            each.kv = each._scratch.take("slots", *each._shape(slots, positions))

    def _needs(self, wanted: dict[str, int]) -> int:
        """Return the bytes of these positions, or of the memory that is held for them."""
        size = self.kv.element_size()
        return sum(max(n * self._own_bytes, self._scratch.size(name) * size) for name, n in wanted.items())

    def _shape(self, rows: int, positions: int) -> tuple[int, ...]:
        return self.layers, self.planes, rows, self.kv_heads, positions, self.head_dim

    def _let_go(self) -> None:
        for each in self.kinds:
            each.kv = each.staged = each.kv.new_empty(0)

    def stage(self, prompts: int, positions: int) -> tuple[Tensor, ...]:
        """Return space of each kind for the keys and values of prefilled prompts until their rows get slots."""
        for each in self.kinds:
            each.staged = each.staged.new_empty(0)
            each.staged = each._scratch.take("staged", *each._shape(prompts, positions))
        if self.memories:
            self.memories.stage(prompts)
        return tuple(each.staged for each in self.kinds)

    def stage_held(self, prompt: int, slot: int, length: int) -> None:
        """Copy the first `length` positions of a slot to staged prompt `prompt`."""
        for each in self.kinds:
            each.staged[:, :, prompt, :, :length].copy_(each.kv[:, :, slot, :, :length])

    def admit(self, prompt: int, length: int, first: int, count: int) -> None:
        """Copy the `length` positions of staged prompt `prompt` into slots [first, first + count)."""
        for each in self.kinds:
            source = each.staged[:, :, prompt : prompt + 1, :, :length]
            each.kv[:, :, first : first + count, :, :length].copy_(source)
        if self.memories:
            self.memories.admit(prompt, first, count)

    def places(self, positions: Tensor) -> Tensor:
        """Return the indices of the next keys and values of slots [0, n) for `write`: int64 [n * planes * kv_head].
        They are the same for every layer, so they are computed once per step."""
        slots, groups, length = self.kv.shape[2:5]
        n = len(positions)
        planes = torch.arange(self.planes, device=positions.device)[:, None] * (slots * groups * length)
        heads = planes + torch.arange(groups, device=positions.device) * length  # [planes, kv_head]
        rows = torch.arange(n, device=positions.device) * (groups * length) + positions
        return (rows[:, None] + heads.flatten()).flatten()

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Write kv [n, planes * kv_head, head_dim]: keys, then values, of one new token per slot [0, n)."""
        self.kv[layer].view(-1, self.head_dim).index_copy_(0, places, kv.reshape(-1, self.head_dim))

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` to slots `target` (int64 [m] each)."""
        for each in self.kinds:
            view = each.kv[:, :, :, :, :length]
            view[:, :, target] = view[:, :, source]
        if self.memories:
            self.memories.move(source, target)

    def release(self) -> None:
        if self.memories:
            self.memories.release()
        for each in self.kinds:
            each._scratch.clear()
        self._let_go()
