"""Write a safetensors file tensor by tensor: its header, which comes first, needs shapes and types only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class SafetensorsFile:
    """A context manager. Written beside `path`, flushed to the disk and renamed when left in order; `sha256` is known
    then. Tensors come in the order of `shapes`: name -> (dtype, shape). Raises OSError."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.path, self._shapes, self.sha256, self.bytes = path, dict(shapes), "", 0
        self._waiting = list(self._shapes)[::-1]
        self._aside = path.with_name(path.name + ".tmp")
        self._hash = hashlib.sha256()

    def __enter__(self) -> SafetensorsFile:
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in self._shapes.items():
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = self._aside.open("wb")
        self._write(len(text).to_bytes(8, "little") + text)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        assert self._waiting and self._waiting[-1] == name, (name, self._waiting[-1:])
        dtype, shape = self._shapes[name]
        assert tuple(tensor.shape) == tuple(shape), (name, tuple(tensor.shape), shape)
        self._waiting.pop()
        self._write(tensor_bytes(tensor.detach().to("cpu", dtype).contiguous()))

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
        self.bytes += len(data)

    def __exit__(self, kind, *unused) -> None:
        if kind is not None:
            self._file.close()
            return
        assert not self._waiting, f"tensors that never came: {self._waiting}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self.path)
        self.sha256 = self._hash.hexdigest()
