"""A safetensors file written tensor by tensor: its header, which comes first, needs only shapes and types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.files import HashedFile

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class SafetensorsFile(HashedFile):
    """A file whose tensors are added in the order of `shapes`: name -> (dtype, shape)."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        super().__init__(path)
        self._shapes = dict(shapes)
        self._waiting = list(self._shapes)[::-1]

    def __enter__(self) -> SafetensorsFile:
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in self._shapes.items():
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        super().__enter__()
        self.write(len(text).to_bytes(8, "little") + text)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        assert self._waiting and self._waiting[-1] == name, (name, self._waiting[-1:])
        dtype, shape = self._shapes[name]
        assert tuple(tensor.shape) == tuple(shape), (name, tuple(tensor.shape), shape)
        self._waiting.pop()
        self.write(tensor_bytes(tensor.detach().to("cpu", dtype).contiguous()))

    def __exit__(self, kind: Any, *unused: Any) -> None:
        assert kind is not None or not self._waiting, f"tensors that were not added: {self._waiting}"
        super().__exit__(kind, *unused)
