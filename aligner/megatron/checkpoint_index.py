"""Index of a sharded checkpoint, read without executing any of its code.

`.metadata` is a pickle, and so is each object beside the tensors: whoever made the folder could have any function
called. Here a pickle may name only the classes of torch's and Megatron's checkpoints. Megatron reads the same files
again in its own way, so they are checked first.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from aligner.errors import CheckpointError
from aligner.foreign import read_record

INDEX, FORMAT_FILE, INTEGRITY = ".metadata", "metadata.json", "integrity.json"
_TORCH, _MEGATRON = "torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.strategies.torch"
ALLOWED = {
    "torch": ("Size",),  # and the dtypes
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
    _TORCH + "filesystem": ("_StorageInfo", "_StoragePrefix"),
    _TORCH + "metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    _TORCH + "planner": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    _MEGATRON: ("MCoreMetadata", "MCoreSavePlan"),  # of earlier versions
}
# what damaged bytes make of the unpickler, or of the classes above
_DAMAGE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
    OverflowError,
    MemoryError,
    RuntimeError,
    AssertionError,
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs, and was not executed")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def read_index(folder: Path) -> Metadata:
    """Read `.metadata`. Raises CheckpointError, also for classes that a checkpoint does not need, which it names."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except _DAMAGE as error:
        raise CheckpointError(f"cannot load checkpoint {folder}: {INDEX}: {error}") from None
    if not _is_index(index):
        raise CheckpointError(f"cannot load checkpoint {folder}: {INDEX}: expected tensors and their places")
    return index


def _is_index(index: Any) -> bool:
    if not isinstance(index, Metadata):
        return False
    tensors, places = getattr(index, "state_dict_metadata", None), getattr(index, "storage_data", None)
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        return False
    return all(isinstance(k, str) and _is_item(v) for k, v in tensors.items()) and all(
        isinstance(k, MetadataIndex) and _is_place(v) for k, v in places.items()
    )


def _is_item(item: Any) -> bool:
    """Return whether it is an object, or a tensor in blocks of as many dimensions."""
    if not isinstance(item, TensorStorageMetadata):
        return isinstance(item, BytesStorageMetadata)
    properties, blocks = getattr(item, "properties", None), getattr(item, "chunks", None)
    if not (_is_size(getattr(item, "size", None)) and isinstance(blocks, list)):
        return False
    shapes = [(getattr(b, "offsets", None), getattr(b, "sizes", None)) for b in blocks]
    whole = all(_is_size(x) and len(x) == len(item.size) for pair in shapes for x in pair)
    return whole and isinstance(getattr(properties, "dtype", None), torch.dtype)


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size)  # of integers, as its constructor sees to


def _is_place(info: Any) -> bool:
    """Return whether it is an uncompressed range in a file of the checkpoint's own folder."""
    path, offset, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
    return (
        isinstance(info, _StorageInfo)
        and isinstance(path, str)
        and Path(path).name == path
        and isinstance(offset, int)
        and isinstance(length, int)
        and min(offset, length) >= 0
        and not getattr(info, "transform_descriptors", None)
    )


def noted_checksums(folder: Path, index: Metadata) -> dict[str, str]:
    """Read file -> SHA-256 from `integrity.json`, which must have the index and all files that it names. Raises
    CheckpointError."""
    files = read_record(folder / INTEGRITY, CheckpointError).text_map("files")
    needed = {INDEX, *(info.relative_path for info in index.storage_data.values())}
    if needed - files.keys():
        missing = ", ".join(sorted(needed - files.keys()))
        raise CheckpointError(f"{folder / INTEGRITY}: expected a checksum of every file, but {missing} have none")
    return files


def check_before_loading(folder: Path) -> Metadata:
    """Check everything that Megatron reads with a plain `pickle.load` or as trusted JSON. Returns `.metadata`. Raises
    CheckpointError."""
    read_record(folder / FORMAT_FILE, CheckpointError).text("sharded_backend")
    index = read_index(folder)
    noted_checksums(folder, index)
    for key, item in index.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            _check_object(folder, key, index.storage_data.get(MetadataIndex(key)))
    return index


def _check_object(folder: Path, key: str, info: _StorageInfo | None) -> None:
    if info is None:
        raise CheckpointError(f"cannot load checkpoint {folder}: {INDEX} has no place of {key!r}")
    read_stored(folder, info, key)


def read_stored(folder: Path, info: _StorageInfo, key: str) -> Any:
    """Read a block or an object, which can hold only tensors and plain values. Raises CheckpointError."""
    try:
        with (folder / info.relative_path).open("rb") as file:
            view = _create_file_view(file, info.offset, info.length)
            return torch.load(view, weights_only=True, map_location="cpu")
    except _DAMAGE as error:
        # torch's text is long, and advises to execute what it has refused
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        after = str(error).partition("WeightsUnpickler error:")[2].strip().splitlines()
        reason = next((line for line in (*lines, *after) if "GLOBAL" in line), after[0] if after else lines[0])
        where = f"{key!r} in {info.relative_path}"
        raise CheckpointError(f"cannot load checkpoint {folder}: {where}: {type(error).__name__}: {reason}") from None
