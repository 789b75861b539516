"""Drafts from a smaller model with the same tokens (`engine.draft_model`).

It is frozen, and whole on every rank of an engine. Its keys and values stand in the engine's cache beside those of the
model that it drafts for, in the same pages. So prompts that rows share, rows that are kept between turns, and moves are
those of that cache. It reads each token that was kept, and writes over drafts that were not. A draft is drawn as the
model's token will be: by the same rule, with the number of its seed and position.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aligner.engines.native.cache import SlotCache
from aligner.engines.native.drafts import RowTokens
from aligner.engines.native.graphs import DecodeGraphs
from aligner.engines.native.load import read
from aligner.engines.native.model import NativeModel
from aligner.engines.native.sampler import sample
from aligner.families.draft_folder import drafting, exported
from aligner.models.folder_check import check_folder
from aligner.models.safetensors_io import open_hf
from aligner.types import SamplingParams


class DraftModel:
    """The model of a folder that drafts for `model`, and its cache. Raises ConfigError or CheckpointError."""

    def __init__(self, folder: str, model: NativeModel):
        path = exported(folder)
        shape = replace(drafting(folder), kernels=model.cfg.kernels)
        self.model = NativeModel(shape, model.device, model.dtype)
        self.graphs: DecodeGraphs | None = None  # of its steps
        self.vocabulary = min(model.cfg.vocab_size, self.model.cfg.vocab_size)
        (*sizes, planes), *others = self.model.cached
        where = model.device, model.dtype
        self.cache = SlotCache(*sizes, *where, planes, None, [SlotCache(*each[:3], *where) for each in others])
        tensors = open_hf(path)
        names = check_folder(tensors, self.model.cfg)
        self.model.restore()
        for name, tensor in read(tensors, names):
            self.model.load(name, tensor)

    def source(self, count: int, slots: int, positions: int, sampling: SamplingParams) -> ModelDrafts:
        return ModelDrafts(count, slots, positions, self, sampling)

    def prefill(self, tokens: Tensor, held: Tensor | None) -> None:
        """Read prompts as `NativeModel.prefill` does, beside which they are staged."""
        self.model.packs.pack()
        self.model.prefill(self._known(tokens), tuple(each.staged for each in self.cache.kinds), held=held)

    def read(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Read tokens of slots [0, n) at positions, int64 [n, w] each. Return their hidden states, or logits where they
        come with them, [n * w, ...]."""
        step = self.model.decoded if self.graphs is None else self.graphs.decode
        return step(self._known(tokens), positions, self.cache, min(longest, self.cache.table.shape.row_tokens))

    def logits(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return float32 logits [n, V] of the last tokens that `read` reads."""
        last = self.read(tokens, positions, longest).view(*tokens.shape, -1)[:, -1]
        logits = self.model.logits(last) if self.graphs is None else last
        return logits[:, : self.vocabulary].contiguous()

    @property
    def held_bytes(self) -> int:
        """The bytes of intermediates."""
        return self.model.scratch.held_bytes + (self.graphs.held_bytes if self.graphs is not None else 0)

    def sleep(self) -> None:
        """Release the intermediates. The weights stay: no refit brings them."""
        if self.graphs is not None:
            self.graphs.clear()
        self.model.scratch.clear()

    def _known(self, tokens: Tensor) -> Tensor:
        """Return the tokens, its last one for those that it lacks: two models may pad one vocabulary differently."""
        return tokens.clamp_max(self.model.cfg.vocab_size - 1)


class ModelDrafts(RowTokens):
    cached = True

    def __init__(self, count: int, slots: int, positions: int, drafter: DraftModel, sampling: SamplingParams):
        super().__init__(count, slots, positions, drafter.model.device)
        self._drafter, self._sampling = drafter, sampling

    def follow(self, last: Tensor, longest: int) -> None:
        """See `DraftSource.follow`. Afterwards it has read what the model has: all but the last token."""
        self._drafter.read(*self._behind(last, 1), longest)

    def draft(self, last: Tensor, longest: int, seeds: Tensor, counts: Tensor) -> Tensor:
        """See `DraftSource.draft`. All rows have drafts. Of drafts that were all kept it has not read the last one."""
        if not self.room:
            self.follow(last, longest)
            return torch.zeros_like(last, dtype=torch.bool)
        tokens, positions = self._behind(last, 2)
        drafts: list[Tensor] = []
        for ahead in range(self.count):
            if drafts:
                tokens, positions = drafts[-1][:, None], last[:, None] + ahead
            logits = self._drafter.logits(tokens, positions, longest + ahead)
            drafts.append(sample(logits, seeds, counts + ahead, self._sampling).tokens)
        self.drafts[: len(last)] = torch.stack(drafts, 1)
        return torch.ones_like(last, dtype=torch.bool)

    def _behind(self, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` tokens from the one before the last, and their positions."""
        positions = (last[:, None] + torch.arange(-1, count - 1, device=last.device)).clamp_min(0)
        return self._tokens[: len(last)].gather(1, positions).long(), positions
