"""The KV cache: one slot per row, active rows first. A row's numbers are in pages (`pages.py`).

Decoding always runs on slots [0, n); when a row finishes, the last active row moves into its slot. With whole rows as
pages its numbers move, and no step gathers. With shorter pages their numbers in the table move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.engines.native.pages import PageTable, PoolShape
from aligner.engines.native.scratch import Scratch
from aligner.engines.native.states import RowStates


class SlotCache:
    """The KV cache [layer, plane, page, kv_head, position of a page, head_dim]. The two planes are keys and values.
    Latent attention has one plane of one head, from which keys and values are computed. `memories`: of layers without
    attention. `beside`: what else is kept of each token, as heads of another number or width. It has the same pages."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        planes: int = 2,
        memories: RowStates | None = None,
        beside: Sequence[SlotCache] = (),
    ):
        self.memories, self.kinds = memories, (self, *beside)
        self.layers, self.planes, self.kv_heads, self.head_dim = layers, planes, kv_heads, head_dim
        self._own_bytes = layers * planes * kv_heads * head_dim * torch.empty((), dtype=dtype).element_size()
        self._scratch = Scratch(device, dtype)
        self.kv = self.staged = torch.empty(0, dtype=dtype, device=device)
        self.table = PageTable(PoolShape(0, 0, 1), device)

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

    def resize(self, shape: PoolShape, staged: int = 0, budget_bytes: int = 1 << 62, prompts: int = 0) -> None:
        """Shape the cache for one generation. At most `staged` positions of prompts wait for slots, of at most
        `prompts` prompts where there are memories.

        Memory is kept between generations and grows when it must, but never beyond the budget: an earlier
        generation's memory for slots may not add up with this one's for prompts.
        """
        wanted = {"slots": shape.pages * shape.tokens, "staged": staged}
        total = sum(each._needs(wanted) for each in self.kinds)
        self._let_go()  # or what is replaced would live until its successor does
        if total + (self.memories.needs(shape.slots, prompts) if self.memories else 0) > budget_bytes:
            self.release()
        if self.memories:
            self.memories.resize(shape.slots)
        table = self.table.renewed(shape)
        for each in self.kinds:
            each.kv, each.table = each._scratch.take("slots", *each._shape(shape.pages, shape.tokens)), table

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
        for page, start, stop in self.table.spans(slot, length):
            for each in self.kinds:
                each.staged[:, :, prompt, :, start:stop].copy_(each.kv[:, :, page, :, : stop - start])

    def admit(self, prompt: int, length: int, first: int, count: int, again: int = 0) -> None:
        """Copy the `length` positions of staged prompt `prompt` into slots [first, first + count), which share whole
        pages, but for the last `again` positions, which each writes anew."""
        for page, start, stop in self.table.admit(first, count, length, again):
            for each in self.kinds:
                each.kv[:, :, page, :, : stop - start].copy_(each.staged[:, :, prompt, :, start:stop])
        if self.memories:
            self.memories.admit(prompt, first, count)

    def places(self, positions: Tensor) -> Tensor:
        """Return the indices of the next keys and values of slots [0, n), at positions [n] or [n, w], for `write`:
        int64 [tokens * planes * kv_head]. They are the same for every layer, so they are computed once per step."""
        pages, groups, length = self.kv.shape[2:5]
        planes = torch.arange(self.planes, device=positions.device)[:, None] * (pages * groups * length)
        heads = planes + torch.arange(groups, device=positions.device) * length  # [planes, kv_head]
        positions = positions.view(len(positions), -1)
        page = self.table.pages[: len(positions)].gather(1, positions // length)
        rows = (page * (groups * length) + positions % length).flatten()
        return (rows[:, None] + heads.flatten()).flatten()

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Write kv [n, planes * kv_head, head_dim]: keys, then values, of new tokens."""
        self.kv[layer].view(-1, self.head_dim).index_copy_(0, places, kv.reshape(-1, self.head_dim))

    def lines(self, slots: slice | Tensor, longest: int) -> Tensor | None:
        """Return which pages' heads `read` gathers for these slots, the same for every layer: int64 [plane, n, kv_head,
        pages]. None: slots are pages."""
        if self.table.whole:
            return None
        pages, groups, length = self.kv.shape[2:5]
        own = self.table.pages[slots, : -(-longest // length)]
        heads = torch.arange(self.planes * groups, device=own.device).view(self.planes, 1, groups, 1) % groups
        planes = torch.arange(self.planes, device=own.device).view(-1, 1, 1, 1) * pages
        return (planes + own[:, None]) * groups + heads

    def read(self, layer: int, slots: slice | Tensor, longest: int, lines: Tensor | None, scratch: Scratch) -> Tensor:
        """Return the first `longest` positions of a layer in these slots, whose `lines` they are: [plane, n, kv_head,
        longest, head_dim]. If they are gathered, the next read with this scratch replaces them."""
        if lines is None:
            return self.kv[layer][:, slots, :, :longest]
        length = self.kv.shape[4]
        out = scratch.take("pages", lines.numel(), length * self.head_dim)
        torch.index_select(self.kv[layer].view(-1, length * self.head_dim), 0, lines.flatten(), out=out)
        return out.view(*lines.shape[:3], -1, self.head_dim)[..., :longest, :]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Move the first `length` positions of slots `source` to slots `target` (int64 [m] each)."""
        if self.table.whole:
            for each in self.kinds:
                view = each.kv[:, :, :, :, :length]
                view[:, :, target] = view[:, :, source]
        else:
            self.table.move(source.tolist(), target.tolist())
        if self.memories:
            self.memories.move(source, target)

    def release(self) -> None:
        if self.memories:
            self.memories.release()
        for each in self.kinds:
            each._scratch.clear()
        self._let_go()
