"""Orders and answers as plain data: JSON of numbers, texts, lists, maps, tensors and sampling parameters.

Nothing else can be encoded, so no message can execute code.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from aligner.types import SamplingParams

DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16)}


def encode(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """Decode a message; sequences become lists."""
    return _built(json.loads(data))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        bits = base64.b64encode(value.flatten().view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": [str(value.dtype), list(value.shape), bits]}
    if isinstance(value, SamplingParams):
        return {"sampling": dataclasses.asdict(value)}
    if isinstance(value, dict):
        return {"map": [[_plain(k), _plain(v)] for k, v in value.items()]}
    assert isinstance(value, list | tuple), type(value)
    return [_plain(v) for v in value]


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return [_built(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "tensor":
        dtype, shape, bits = what
        data = bytearray(base64.b64decode(bits))
        empty = torch.empty(0, dtype=DTYPES[dtype])
        return (torch.frombuffer(data, dtype=DTYPES[dtype]) if data else empty).view(shape)
    if kind == "sampling":
        return SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in what.items()})
    assert kind == "map", kind
    return {_built(k): _built(v) for k, v in what}
