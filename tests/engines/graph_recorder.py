"""A CUDA graph's stand-in on the CPU: as strict as the real one about what it replays and what cannot be captured. It
keeps all memory that was used alive, so it cannot see what a real graph would find freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# what asks the device for a number, or has shapes that depend on data: a capture fails there
SYNCHRONISING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "repeat_interleave.Tensor",
    "bincount",
    "lift_fresh",
    "equal",
)


class CaptureError(AssertionError):
    pass


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what was written to, by address, and a copy

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        overload = f"{name}.{function._overloadname}"
        masks = name in ("index", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] if i is not None
        )
        if masks or {name, overload} & {*SYNCHRONISING}:
            raise CaptureError(f"{function} cannot be captured")
        for i, argument in enumerate(function._schema.arguments):
            written = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
            if argument.is_write and isinstance(written, Tensor):
                storage = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out


class CpuRecorder:
    """`Recorder`: a replay runs the recorded operations on the recorded tensors, and puts every result where the
    recorded one lay. What Python did between them happened once."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        with _Tape() as tape:
            step()
        self.recorded += 1
        for storage, before in tape.before.values():  # a capture computes nothing
            storage.copy_(before)

        def replay() -> None:
            self.replayed += 1
            for function, args, kwargs, result in tape.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
