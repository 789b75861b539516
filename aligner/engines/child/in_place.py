"""An engine in a child process that takes its weights by the refit's plan: on a rank that only generates, which gets
no whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.child.buckets import Memory, MemoryFile, Slot, aligned
from aligner.engines.child.engine import ChildEngine
from aligner.engines.child.worker import Settings
from aligner.families.table import family_table
from aligner.models.params import expected_hf_shapes, hf_dtypes
from aligner.models.shards import hf_tensors


class FilledInPlace(ChildEngine):
    """A mix-in of engines that are filled in place. Shards of tensors come in any order, so the buffer that the child
    reads holds the whole model, in host memory even with a GPU: one on each node. Each rank of an engine on a node
    writes its share of it. The child of each rank reads it at the end, `bucket_bytes` in a call, in place: each rank
    copies its share of a tensor to its device."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: torch.dtype,
        bucket_bytes: int = 256 << 20,
        **options: Any,
    ):
        self._bucket_bytes = bucket_bytes
        self._tensors = {tensor.name: tensor for tensor in hf_tensors(model)}
        self._slots: dict[str, Slot] = {}
        end, dtypes = 0, hf_dtypes(family_table(model), dtype)
        for name, shape in expected_hf_shapes(model).items():
            self._slots[name] = Slot(name, shape, dtypes[name], end)
            end = aligned(end + self._slots[name].nbytes)
        super().__init__(model, config, dtype=dtype, bucket_bytes=end, **options)
        self.can = replace(self.can, in_place=True)

    def _buffer(self, size: int) -> tuple[Tensor, Memory | None]:
        own = MemoryFile.create(size) if self._rank == self._here[0] else None
        first = self._of_ranks(own)[self._here[0]]
        assert first is not None
        return first.tensor(), own

    def _settings(self, memory: Memory) -> Settings:
        return replace(super()._settings(memory), lasting=True)

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """See `RolloutEngine.weight_view`."""
        if not self.rewrite(name, start, stop):
            return None
        return self._slots[name].view(self._writer.buffer).narrow(self._tensors[name].axis, start, stop - start)

    def rewrite(self, name: str, start: int, stop: int, afresh: bool = False) -> bool:
        """See `RolloutEngine.rewrite`."""
        return self._ledger.accept_shard(name, start, stop)

    def finish_update(self) -> None:
        for name, tensor in self._tensors.items():
            self._ledger.settle_shards(name, *tensor.interval(len(self._here), self._here.index(self._rank)))
        self._ledger.finish(self._load)  # not before every rank has written

    def _load(self) -> None:
        for slots in self._buckets():
            self._take(slots)
        self._finish()

    def _buckets(self) -> Iterator[list[Slot]]:
        """Yield buckets of at most `bucket_bytes`, or of one tensor."""
        bucket: list[Slot] = []
        for slot in self._slots.values():
            if bucket and slot.start + slot.nbytes - bucket[0].start > self._bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(slot)
        if bucket:
            yield bucket
