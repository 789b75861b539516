"""Reading and writing the weights of a Hugging Face folder, without holding a whole model in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HfTensors(Mapping[str, Tensor]):
    """Name -> tensor over the safetensors files of a folder; a tensor is read when it is asked for."""

    def __init__(self, files: dict[str, Path]):
        self._files = files
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._file(name).get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading it

    def part(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """[start, stop) along `axis` (0 or 1); nothing else is read."""
        whole = self._file(name).get_slice(name)
        return whole[start:stop] if axis == 0 else whole[:, start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def itemsize(self, name: str) -> int:
        """Bytes of an element."""
        return {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(self._file(name).get_slice(name).get_dtype(), 1)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(f"the weights hold no tensor {name!r}")
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]

    def close(self) -> None:
        """Let go of the files, whose pages count as this process's memory once they have been read."""
        self._open.clear()

    def paths(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: Path):
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None


def open_hf(folder: str | Path) -> HfTensors:
    """The tensors of a folder with `model.safetensors` or a sharded index. Raises CheckpointError."""
    folder = Path(folder)
    if (folder / INDEX).is_file():
        weights = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in weights.items()}
        absent = sorted({p.name for p in files.values() if not p.is_file()})
        if absent:
            raise CheckpointError(f"{folder}: {INDEX} names files that are not there: {', '.join(absent)}")
        return HfTensors(files)
    if (folder / SINGLE).is_file():
        return HfTensors(dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE))
    raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}")


def write_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    max_shard_bytes: int = 5 << 30,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Stream tensors into a Hugging Face folder; at most one shard is in memory.

    Written to `<folder>.tmp`, then renamed, so the folder is there whole or not at all. `extra(path)` may add files
    (tokenizer, chat template) before the rename. A tensor larger than `max_shard_bytes` gets a shard of its own. Raises
    OSError if it cannot be written; what stood in `folder` before is then still there.
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
    """One file. Raises OSError, also for a full disk, which safetensors tells in its own way."""
    try:
        save_file(dict(tensors), str(path), metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """`save_tensors`, of which the file is there complete or not at all."""
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
        assert name not in seen, f"tensor {name} was given twice"
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
