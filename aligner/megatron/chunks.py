"""Sharded checkpoints without a model in memory: where each parameter lies in them, and reading and writing its blocks
one at a time.

A checkpoint of `checkpoint.py` is a folder in torch's distributed format: files of `torch.save`d blocks, and
`.metadata`, which says which block of which tensor lies where. Names and shapes of the tensors come from a model on the
meta device, so that they are Megatron's own, whatever the layout that wrote or will read the checkpoint.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import CheckpointError
from aligner.files import HashedFile
from aligner.megatron.checkpoint_index import read_index, read_stored
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head, build_model
from aligner.megatron.weights import local_parameters

COMMON_KEY, COMMON_FILE = "common_state/shard_0_1", "common.distcp"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = {str(dtype): dtype for dtype in (*_FLOATS, torch.int64)}


@dataclass(frozen=True)
class StorageLocation:
    """A canonical parameter in a checkpoint: tensor `key` of `size`, at `layer` of its first axis if there is one."""

    key: str
    size: tuple[int, ...]
    layer: int | None
    dtype: torch.dtype

    def offsets(self, inside: Sequence[int]) -> tuple[int, ...]:
        return tuple(inside) if self.layer is None else (self.layer, *inside)

    def shape(self, inside: Sequence[int]) -> tuple[int, ...]:
        return tuple(inside) if self.layer is None else (1, *inside)


def places_of(cfg: ModelConfig, head: Head, dtype: torch.dtype) -> dict[str, StorageLocation]:
    """Return where the parameters of a model of this shape lie, by canonical name. Collective (process groups)."""
    layout, meta = build_layout(ParallelConfig()), torch.device("meta")
    with meta:
        model = build_model(cfg, layout, head, dtype, meta)
    state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
    own = {id(p): name for name, p in local_parameters(model).items()}
    places = {}
    for name, parameter in model.named_parameters():
        item = state[name]
        if isinstance(item, ShardedTensorFactory):  # gate and up, which it splits
            item = next(x for x in _leaves(item.build()) if isinstance(x, ShardedTensor))
        layer = item.global_offset[0] if item.prepend_axis_num else None
        places[own[id(parameter)]] = StorageLocation(item.key, tuple(item.global_shape), layer, item.dtype)
    assert places.keys() == set(own.values()), places.keys() ^ set(own.values())
    return places


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list) else [tree]


# ---- writing


@dataclass(frozen=True)
class Block:
    """A written block of tensor `key`, at `start` of its file."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int


class BlockFile(HashedFile):
    """A file of blocks."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.blocks: list[Block] = []
        self._failure: OSError | None = None

    def add(self, key: str, offsets: tuple[int, ...], tensor: Tensor) -> None:
        start = self.bytes
        # a copy of what is a part of something larger: torch.save writes the whole storage
        whole = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        try:
            torch.save(whole, self)
        except RuntimeError:  # of torch's writer, which was left in the middle
            if self._failure is None:
                raise
            raise self._failure from None
        block = Block(key, offsets, tuple(tensor.shape), str(tensor.dtype), start, self.bytes - start)
        self.blocks.append(block)

    def write(self, data: bytes | memoryview) -> int:
        """Write for torch.save."""
        try:
            return super().write(data)
        except OSError as error:
            self._failure = error
            raise


def write_index(folder: Path, files: dict[str, list[Block]], places: dict[str, StorageLocation]) -> None:
    """Write what makes the block files of `folder` a checkpoint: the step, `.metadata`, and Megatron's description of
    the format."""
    sizes = {entry.key: entry.size for entry in places.values()}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    for file, blocks in files.items():
        for b in blocks:
            offsets, shape = torch.Size(b.offsets), torch.Size(b.shape)
            index = MetadataIndex(b.key, offsets, len(chunks[b.key]))
            assert index not in storage, f"{b.key} at {b.offsets} was written twice"
            storage[index] = _StorageInfo(file, b.start, b.length)
            chunks[b.key].append(ChunkStorageMetadata(offsets, shape))
            dtypes[b.key] = _DTYPES[b.dtype]
    tensors: dict[str, Any] = {}
    for key, blocks_written in chunks.items():
        covered, wanted = sum(c.sizes.numel() for c in blocks_written), torch.Size(sizes[key]).numel()
        assert covered == wanted, f"{key}: {covered} of {wanted} elements were written"
        properties = TensorProperties(dtype=dtypes[key])
        tensors[key] = TensorStorageMetadata(properties, torch.Size(sizes[key]), blocks_written)
    assert chunks.keys() == sizes.keys(), chunks.keys() ^ sizes.keys()
    with (folder / COMMON_FILE).open("wb") as file:
        torch.save([{"step_count": 0}], file)
        storage[MetadataIndex(COMMON_KEY)] = _StorageInfo(COMMON_FILE, 0, file.tell())
    tensors[COMMON_KEY] = BytesStorageMetadata()
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(tensors, storage_data=storage), file)
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(description), encoding="utf-8")


# ---- reading


class Blocks:
    """Tensors of a checkpoint, read a region at a time. The last block stays in memory, so successive regions of one
    block read it once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = read_index(folder)
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def size(self, key: str) -> tuple[int, ...]:
        if not isinstance(self.index.state_dict_metadata.get(key), TensorStorageMetadata):
            raise CheckpointError(f"checkpoint {self.folder} holds no tensor {key!r}")
        return tuple(self.index.state_dict_metadata[key].size)

    def dtype(self, key: str) -> torch.dtype:
        self.size(key)
        return self.index.state_dict_metadata[key].properties.dtype

    def files(self) -> set[str]:
        return {info.relative_path for info in self.index.storage_data.values()}

    def region(self, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return [offsets, offsets + shape) of tensor `key`. Raises CheckpointError if any of it is missing."""
        size = self.size(key)
        for chunk in self.index.state_dict_metadata[key].chunks:
            if (tuple(chunk.offsets), tuple(chunk.sizes)) == (offsets, shape):  # one whole block, read once
                block, self._last = self._block(key, chunk), None
                return block
        out, missing = torch.empty(shape, dtype=self.dtype(key)), torch.Size(shape).numel()
        for chunk in self.index.state_dict_metadata[key].chunks:
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, shape, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            block = self._block(key, chunk)
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            out[target] = block[inside]
            missing -= block[inside].numel()
        if missing:
            raise CheckpointError(f"checkpoint {self.folder}: {key} of size {size} lacks {missing} elements")
        return out

    def _block(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(key, chunk.offsets)
        if self._last is None or self._last[0] != index:
            self._last = None  # free before reading
            info = self.index.storage_data.get(index)
            if info is None:
                raise CheckpointError(f"checkpoint {self.folder}: its index has no place of {key} at {chunk.offsets}")
            block = read_stored(self.folder, info, key)
            if not isinstance(block, Tensor) or (block.shape, block.dtype) != (chunk.sizes, self.dtype(key)):
                expected = f"{self.dtype(key)} {tuple(chunk.sizes)}"
                path = self.folder / info.relative_path
                raise CheckpointError(f"{path}: {key} at {tuple(chunk.offsets)}: expected a block {expected}")
            self._last = index, block
        return self._last[1]
