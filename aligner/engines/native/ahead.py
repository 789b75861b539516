"""Drafts from the model's own layer for multi-token prediction (`model.mtp.layers`).

As in training (`aligner/megatron/mtp.py`) it predicts from the hidden state of a token, behind the final norm, and from
the next token the one behind. It is one more layer of the cache, with keys and values of a token at the position of the
one before. So it reads what a step fed once the tokens behind are sampled, and writes over drafts that were not kept.
The first draft follows from the model's hidden state, each further one from the layer's own output.

A draft is drawn as the model's token will be: by the same rule, with the number of its seed and position. So the two
agree the more often the more alike both distributions are, at any temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.block_inputs import BlockContext
from aligner.engines.native.cache import SlotCache
from aligner.engines.native.drafts import DraftSource
from aligner.engines.native.sampler import sample
from aligner.families.rows import PREDICTS_AHEAD
from aligner.ops.kernels.products import linear
from aligner.types import SamplingParams

if TYPE_CHECKING:
    from aligner.engines.native.model import NativeModel


class AheadLayer:
    """What such a layer has beside a layer's own weights, whole on every rank."""

    def __init__(self, kit: BlockContext, cfg: ModelConfig):
        self.kit, self.layer = kit, cfg.num_layers
        self.norms = kit.empty(3, cfg.hidden_size)  # of the embedding, of the hidden state, and of its output
        self.matrix = kit.empty(cfg.hidden_size, 2 * cfg.hidden_size)

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        own = dict(zip(("enorm", "hnorm", "final_layernorm"), self.norms, strict=True)) | {"eh_proj": self.matrix}
        named = {row.canonical.split(".")[1]: row.hf[0].format(layer=self.layer) for row in PREDICTS_AHEAD}
        return {named[name]: tensor for name, tensor in own.items()}

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [M, hidden]."""
        parts = [self.kit.norm(x, norm) for x, norm in zip((embedded, hidden), self.norms[:2], strict=True)]
        return linear(torch.cat(parts, 1), self.matrix)


class AheadDrafts(DraftSource):
    cached = True

    def __init__(self, count: int, slots: int, model: NativeModel, cache: SlotCache, sampling: SamplingParams):
        super().__init__(count, slots, model.device)
        self._model, self._cache, self._sampling = model, cache, sampling
        self._made = self._first = self.drafts[:0]

    def read(self, hidden: Tensor, following: Tensor, first: Tensor, longest: int) -> None:
        """Read hidden states [n, w, H] of slots [0, n), the first of each at position `first` int64 [n], all < longest,
        and the tokens int64 [n, w] that follow them."""
        positions = first[:, None] + torch.arange(hidden.shape[1], device=first.device)
        flat = hidden.flatten(0, 1), following.flatten()
        self._made = self._model.predict(*flat, positions, self._cache, longest).view_as(hidden)
        self._first = first.clone()

    def draft(self, last: Tensor, longest: int, seeds: Tensor, counts: Tensor) -> Tensor:
        """See `DraftSource.draft`. All rows have drafts, those without a new token the ones that they had."""
        n, new, most = len(last), last - self._first, self._cache.table.shape.row_tokens
        if not self.room:
            return torch.zeros_like(last, dtype=torch.bool)
        x = self._made[torch.arange(n, device=last.device), (new - 1).clamp_min(0)]
        drafts: list[Tensor] = []
        for ahead in range(self.count):
            if drafts:
                reach = min(longest + ahead, most)
                x = self._model.predict(x, drafts[-1], last + ahead - 1, self._cache, reach)
            drafts.append(sample(self._model.logits(x), seeds, counts + ahead, self._sampling).tokens)
        self.drafts[:n] = torch.stack(drafts, 1).where(new[:, None] > 0, self.drafts[:n])
        return torch.ones_like(last, dtype=torch.bool)
