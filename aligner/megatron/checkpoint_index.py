"""What says where the blocks of a sharded checkpoint lie, read without executing anything of it.

`.metadata` is a pickle, and so is each object beside the tensors: whoever made the folder could have any function
called. Here a pickle may name the classes of torch's and Megatron's checkpoints and nothing else. Megatron reads the
same files again in its own way, so they are checked before it does.
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
    """`.metadata`. Raises CheckpointError, also for classes that a checkpoint does not need, which are named."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except _DAMAGE as error:
        raise CheckpointError(f"cannot load checkpoint {folder}: {INDEX}: {error}") from None
    if not _is_index(found):
        raise CheckpointError(f"cannot load checkpoint {folder}: {INDEX}: expected tensors and their places")
    return found


def _is_index(found: Any) -> bool:
    if not isinstance(found, Metadata):
        return False
    tensors, places = found.state_dict_metadata, getattr(found, "storage_data", None)
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        return False
    kinds = TensorStorageMetadata | BytesStorageMetadata
    return all(isinstance(k, str) and isinstance(v, kinds) for k, v in tensors.items()) and all(
        isinstance(k, MetadataIndex) and _is_place(v) for k, v in places.items()
    )


def _is_place(info: Any) -> bool:
    """In a file of the checkpoint's own folder, as it is (no compression)."""
    return (
        isinstance(info, _StorageInfo)
        and isinstance(info.relative_path, str)
        and Path(info.relative_path).name == info.relative_path
        and isinstance(info.offset, int)
        and isinstance(info.length, int)
        and min(info.offset, info.length) >= 0
        and not getattr(info, "transform_descriptors", None)
    )


def noted_checksums(folder: Path, index: Metadata) -> dict[str, str]:
    """File -> SHA-256 of `integrity.json`, which must have all files that the index names, and the index. Raises
    CheckpointError."""
    files = read_record(folder / INTEGRITY, CheckpointError).text_map("files")
    needed = {INDEX, *(info.relative_path for info in index.storage_data.values())}
    if needed - files.keys():
        missing = ", ".join(sorted(needed - files.keys()))
        raise CheckpointError(f"{folder / INTEGRITY}: expected a checksum of every file, found none of {missing}")
    return files


def check_before_loading(folder: Path) -> Metadata:
    """Everything that Megatron reads with a plain `pickle.load`, or as JSON that it trusts; gives `.metadata`. Raises
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
    path = folder / info.relative_path
    try:
        with path.open("rb") as file:
            torch.load(_create_file_view(file, info.offset, info.length), weights_only=True, map_location="cpu")
    except _DAMAGE as error:
        reasons = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        told = next((line for line in reasons if "GLOBAL" in line), reasons[0])  # which names what it wanted to call
        raise CheckpointError(
            f"cannot load checkpoint {folder}: {key!r} in {path.name}: {type(error).__name__}: {told}"
        ) from None
