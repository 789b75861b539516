"""Reading and writing the weights of a Hugging Face folder, without holding a whole model in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.config.sections.model.mtp import MtpConfig
from aligner.errors import CheckpointError
from aligner.families import find
from aligner.families.family import Names
from aligner.families.hf_config import config_from_hf, float8_block, is_mxfp4
from aligner.families.hf_rope import NOTHING
from aligner.families.within import INNER, language_model, own_name, read_config
from aligner.foreign import JsonObject, read_record
from aligner.models.fused import FusedMatrix, parts_of
from aligner.models.quantised import (
    BLOCKS,
    BYTES,
    MXFP4,
    PACKED,
    PAIRS,
    POWERS,
    SCALE_NAMES,
    SCALES,
    dequantised,
    grid,
    unpacked,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AHEAD = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # of config.json: layers that predict further tokens


class HfTensors(Mapping[str, Tensor]):
    """A mapping name -> tensor over the safetensors files of a folder; a tensor is read on access.

    With `block`, tensors with a scale are dequantised to float32, and scales are no entries. With `parts`, fused
    tensors are no entries, but their matrices are (`models/fused.py`). If `packed`, these may be in MXFP4, and are also
    read as float32. `within`: of a language model within a larger one (`families/within.py`). `announced`:
    config.json's numbers of layers that are not the language model's own, by their keys. `published`: names in files
    (`families/family.py`).
    """

    def __init__(
        self,
        files: dict[str, Path],
        block: tuple[int, int] | None = None,
        parts: Mapping[str, FusedMatrix] | None = None,
        packed: bool = False,
        announced: Mapping[str, int] = MappingProxyType({}),
        within: bool = False,
        published: Names = (),
    ):
        self.block, self.announced, self.within, self._published = block, announced, within, published
        self._listed = files
        parts = parts or {}
        self._parts = {name: matrix for name, matrix in parts.items() if matrix.stored in files}
        packs = {p.stored for p in parts.values() if packed and {p.stored + BLOCKS, p.stored + SCALES} <= files.keys()}
        self._packed = {name: matrix for name, matrix in parts.items() if matrix.stored in packs - files.keys()}
        ends = [end for end in SCALE_NAMES if block]
        scales = {name.removesuffix(end) + "weight": name for end in ends for name in files if name.endswith("." + end)}
        self._scales = {name: scale for name, scale in scales.items() if name in files}
        hidden = {*self._scales.values(), *(matrix.stored for matrix in self._parts.values())}
        hidden |= {matrix.stored + end for matrix in self._packed.values() for end in (BLOCKS, SCALES)}
        self._files = {name: path for name, path in files.items() if name not in hidden}
        self._files |= {name: files[matrix.stored] for name, matrix in self._parts.items()}
        self._files |= {name: files[matrix.stored + BLOCKS] for name, matrix in self._packed.items()}
        self._open: dict[Path, Any] = {}

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(next(iter(self._listed.values())).parent) if self._listed else "the folder"

    def __getitem__(self, name: str) -> Tensor:
        if name in self._parts or name in self._packed or name in self._scales:
            return self.read(name, 0, 0, self.shape(name)[0])
        return self._read(name, lambda file: file.get_tensor(name))

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading it

    def read(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Read [start, stop) along `axis` (0 or 1), and only the needed scales."""
        if name in self._packed:
            return self._unpacked(self._packed[name], axis, start, stop)
        if self._is_pairs(name):
            return self._unpacked_pairs(name, axis, start, stop)
        if name in self._parts:
            matrix = self._parts[name].along(axis, start, stop)
            return matrix.turned(self._read(matrix.stored, lambda file: file.get_slice(matrix.stored)[matrix.index]))
        rows = slice(start, stop)
        stored = self._read(name, lambda file: file.get_slice(name)[rows if axis == 0 else (slice(None), rows)])
        if name not in self._scales:
            return stored
        first = (start, 0) if axis == 0 else (0, start)
        return dequantised(self._scales[name], stored, self._scale(name), self._block, *first)

    def _unpacked(self, whole: FusedMatrix, axis: int, start: int, stop: int) -> Tensor:
        """Read a slice of a matrix in MXFP4, stored transposed with blocks along its last axis."""
        first = start // PACKED if axis else 0
        slab = whole if axis else whole.along(0, start, stop)
        expert, _, rows = slab.index
        groups = slice(first, -(-stop // PACKED)) if axis else slice(None)
        bytes_, scales = (
            self._read(slab.stored + end, lambda file, end=end: file.get_slice(slab.stored + end)[expert, rows, groups])
            for end in (BLOCKS, SCALES)
        )
        numbers = unpacked(slab.stored + SCALES, bytes_, scales)
        return numbers[:, start - first * PACKED : stop - first * PACKED] if axis else numbers

    def _is_pairs(self, name: str) -> bool:
        """Return whether a matrix of its own is in MXFP4."""
        return name in self._scales and self._stored_dtype(name) == PAIRS

    def _unpacked_pairs(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        def read(stored: str, of_group: int) -> Tensor:
            groups = slice(start // PACKED * of_group, -(-stop // PACKED) * of_group)
            index = (slice(None), groups) if axis else slice(start, stop)
            return self._read(stored, lambda file: file.get_slice(stored)[index]).view(torch.uint8)

        numbers = unpacked(self._scales[name], read(name, PACKED // 2), read(self._scales[name], 1))
        first = start % PACKED
        return numbers[:, first : first + stop - start] if axis else numbers

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            matrix = self._packed[name]
            experts, columns, rows = matrix.shape
            self._check_packed(name, columns)
            self._check_shape(matrix.stored + BLOCKS, (experts, rows, columns // PACKED, PACKED // 2), name)
            self._check_shape(matrix.stored + SCALES, (experts, rows, columns // PACKED), name)
        elif name in self._parts:
            matrix = self._parts[name]
            self._check_shape(matrix.stored, matrix.shape, name)
        elif self._is_pairs(name):
            rows, columns = self._stored_shape(name)
            self._check_packed(name, 2 * columns)
            return rows, 2 * columns
        else:
            return self._stored_shape(name)
        return tuple(matrix.turned(torch.empty(matrix.shape, device="meta")[matrix.index]).shape)

    def _check_packed(self, name: str, columns: int) -> None:
        if columns % PACKED:
            raise CheckpointError(f"{self.where}: {name} has rows of {columns}: expected a multiple of {PACKED}")

    def _check_shape(self, stored: str, wanted: tuple[int, ...], name: str) -> None:
        stored_shape = self._stored_shape(stored)
        if stored_shape != wanted:
            expected = f"the model config says {wanted}, which includes {name}"
            raise CheckpointError(f"{self.where}: {stored} has shape {stored_shape}, but {expected}")

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return self._read(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def dtype(self, name: str) -> str:
        """Return safetensors' name of the stored type; MXFP4 for packed bytes."""
        if name in self._packed:
            for stored in (self._packed[name].stored + end for end in (BLOCKS, SCALES)):
                if self._stored_dtype(stored) != BYTES:
                    raise CheckpointError(f"{self.where}: {stored} is {self._stored_dtype(stored)}: expected {BYTES}")
            return MXFP4
        if self._is_pairs(name):
            scale = self._scales[name]
            if self._stored_dtype(scale) != POWERS:
                raise CheckpointError(f"{self.where}: {scale} is {self._stored_dtype(scale)}: expected {POWERS}")
            return MXFP4
        return self._stored_dtype(self._parts[name].stored if name in self._parts else name)

    def _stored_dtype(self, name: str) -> str:
        return self._read(name, lambda file: file.get_slice(name).get_dtype())

    def scale_shape(self, name: str) -> tuple[int, ...] | None:
        return self.shape(self._scales[name]) if name in self._scales else None

    def check_scale(self, name: str) -> None:
        """Raise CheckpointError if the scales of a quantised matrix are not one for each block."""
        shape, block = self.scale_shape(name), (1, PACKED) if self._is_pairs(name) else self._block
        if shape != (wanted := grid(self.shape(name), block)):
            expected = f"{wanted} for blocks of {block}"
            raise CheckpointError(f"{self.where}: {self._scales[name]} has shape {shape}: expected {expected}")

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element after reading."""
        sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, MXFP4: 4, "I64": 8, "I32": 4}
        return 4 if name in self._scales else sizes.get(self.dtype(name), 1)

    def announced_ahead(self, key: str) -> int:
        """Return config.json's number of layers that predict further tokens, by its key without that of a section."""
        return next((count for name, count in self.announced.items() if name.rpartition(".")[2] == key), 0)

    def unlisted(self) -> list[str]:
        """Return tensors of the files that the index does not name. Opens every file."""
        names = (name for path in self.paths() for name in self._file(path).keys())  # noqa: SIM118 (no mapping)
        return [name for name in names if name not in self._listed]

    @property
    def _block(self) -> tuple[int, int]:
        assert self.block is not None
        return self.block

    def _scale(self, name: str) -> Tensor:
        scale = self._scales[name]
        return self._read(scale, lambda file: file.get_tensor(scale))

    def _read[T](self, name: str, work: Callable[[Any], T]) -> T:
        if name not in self._listed:
            raise CheckpointError(f"the weights hold no tensor {name!r}")
        path = self._listed[name]
        try:
            return work(self._file(path))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from None

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open(path, self._published)
        return self._open[path]

    def close(self) -> None:
        """Close the files: pages that were read count as this process's memory."""
        self._open.clear()

    def paths(self) -> list[Path]:
        return sorted(set(self._listed.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _File:
    """An open file, its tensors by the names that a language model alone would have."""

    def __init__(self, path: Path, published: Names):
        self._file = safe_open(str(path), framework="pt", device="cpu")
        self._stored = _own_names(self._file.keys(), path, published)
        self.keys = self._stored.keys

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(self._stored.get(name, name))

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._stored.get(name, name))


def _own_names(stored: Iterable[str], path: Path, published: Names) -> dict[str, str]:
    """Return the name in files of each tensor, by its own name."""
    names = dict[str, str]()
    for name in stored:
        own = own_name(name, published)
        if (other := names.setdefault(own, name)) != name:
            raise CheckpointError(f"{path}: {own} is there twice, as {other} and {name}")
    return names


def _open(path: Path, published: Names) -> _File:
    try:
        return _File(path, published)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None


def open_hf(folder: str | Path, ahead: bool = False) -> HfTensors:
    """Open the tensors of a folder with `model.safetensors` or a sharded index, without a check of names and shapes;
    also the experts of its layer for multi-token prediction by their own names, if it is to be used (`ahead`).

    `models/folder_check.py` checks them. Raises CheckpointError, ConfigError for an unsupported quantisation.
    """
    folder = Path(folder)
    config, single, index = folder / "config.json", folder / SINGLE, folder / INDEX
    block, parts, packed, beside = None, dict[str, FusedMatrix](), False, dict[str, Any]()
    published: Names = ()
    if config.is_file():
        whole = read_config(folder)
        raw = language_model(whole)
        beside = {"announced": _announced(whole, raw), "within": INNER in whole}
        block, packed = float8_block(raw), is_mxfp4(raw)
        family = find(raw.text("model_type", ""))
        beside["published"] = published = family.published if family else ()
        if family is not None and family.joined:
            parts = parts_of(replace(config_from_hf(folder), mtp=MtpConfig(int(ahead))))
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, found both: remove the unintended one")
    if single.is_file():
        return HfTensors(dict.fromkeys(_open(single, published).keys(), single), block, parts, packed, **beside)
    if not index.is_file():
        pickled = any(folder.glob("pytorch_model*.bin"))
        hint = ". Pickled weights (*.bin) are not read: save them again as safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}{hint}")
    files = read_record(index, CheckpointError).text_map("weight_map")
    absent = sorted({name for name in set(files.values()) if Path(name).name != name or not (folder / name).is_file()})
    if absent or not files:
        names = ", ".join(map(repr, absent)) or "none"
        raise CheckpointError(f"{folder}: {INDEX} names missing files: {names}")
    located = {own: folder / files[name] for own, name in _own_names(files, index, published).items()}
    return HfTensors(located, block, parts, packed, **beside)


def _announced(whole: JsonObject, raw: JsonObject) -> dict[str, int]:
    """Return the numbers of layers of the parts beside a language model by config.json, whose own part is `raw`."""
    vision = whole.record("vision_config", NOTHING)
    keys = [(vision, "depth"), (vision, "num_hidden_layers"), *((raw, key) for key in AHEAD)]
    counts = {section.prefix + key: section.integer(key) for section, key in keys if key in section}
    # Nemotron's heads consist of several layers
    kinds = raw.text("mtp_hybrid_override_pattern", "") or raw.list("mtp_layers_block_type", []) or ["one"]
    return {key: count * len(kinds) if key.endswith(AHEAD) else count for key, count in counts.items()}


def write_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    max_shard_bytes: int = 5 << 30,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Stream tensors into a Hugging Face folder; at most one shard is in memory.

    They are written to `<folder>.tmp`, then renamed, so the folder is complete or absent. `extra(path)` may add files
    (tokenizer, chat template) before the rename. A tensor larger than `max_shard_bytes` gets a shard of its own. Raises
    OSError if it cannot be written; the old content of `folder` then remains.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write_shards(aside, tensors, max_shard_bytes)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if extra:
            extra(aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():  # a folder cannot be replaced in one step: keep the old one until the new one is in place
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file with the umask's permissions (safetensors writes only for its owner).

    Raises OSError, also for a full disk, which safetensors reports by its own error.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), str(path), metadata=dict(metadata))
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file like `save_tensors`, complete or not at all."""
    aside = path.with_name(path.name + ".tmp")
    save_tensors(aside, {name: t.contiguous() for name, t in tensors.items()}, metadata)
    aside.rename(path)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    seen: set[str] = set()
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        save_tensors(folder / f"shard-{len(shards)}", shard, {"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in tensors:
        assert name not in seen, f"tensor {name} was passed twice"
        seen.add(name)
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
        # a copy: safetensors refuses tensors that share storage, and the caller may reuse its buffer
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    if shard or not shards:
        flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weights = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weights |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
