"""Tensors "on cuda": shapes, dtypes and lifetimes without storage, by torch's FakeTensorMode. Tensors on the CPU stay
real, as lengths, packing and rewards decide what the program does.

The content of a device tensor is unknown: the host reads zeros, or the values of `answers`.
"""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from aligner.plan.devices import Device
from aligner.rehearse import kernels
from aligner.rehearse.kernels import CUDA
from aligner.rehearse.order import Order, Released, span_of
from aligner.rehearse.prices import Pricing
from aligner.rehearse.record import RehearsalRecord, source_line

aten = torch.ops.aten
BLOCK = 512  # bytes: what CUDA's allocator rounds to
LARGE = 1 << 28  # bytes: a host tensor above this has no storage either (offloaded weights, checkpoints)
MAPPED = 1 << 16  # bytes: zeros from here on have a mapping of their own
FACTORIES = {
    *(aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.randn.generator, aten.randn.default, aten.rand.default),
}
FLOAT64 = torch.float64
# (end of a file's name, function) -> values that the host reads there, from the function's variables
Answer = Callable[[Tensor, dict[str, Any]], Tensor]


def on_device(x: object) -> bool:
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


def _flat(values: tuple | list, tensors: list) -> list:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            _flat(value, tensors)
    return tensors


class RehearsedDevice(TorchDispatchMode):
    """The GPU of the rehearsed rank; a context in which the program runs."""

    def __init__(self, record: RehearsalRecord, sheet: Device, gpus_per_node: int):
        super().__init__()
        self.record, self.memory_bytes = record, int(sheet.memory_bytes)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.now = self.peak = 0
        self._peak_before = 0  # of the phase, when it was entered
        self.live: dict[int, tuple[int, str]] = {}  # storage -> (bytes, the line that made it)
        self.order = Order(self.live)
        self.pricing = Pricing(record, self.order, sheet, gpus_per_node)
        self._operations: dict[tuple, int] = {}  # of products, by the function and its sizes
        self.pinned: set[int] = set()  # storages of the host
        self.capturing = False  # a CUDA graph
        self.answers: dict[tuple[str, str], Answer] = {}
        self.collective: Callable[..., Any] | None = None  # runs torch.distributed's operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled; else each operation goes through its wrapper
        return False

    def __enter__(self) -> RehearsedDevice:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.fake.__exit__(*details)

    # ---- memory

    def _add(self, size: int) -> None:
        self.now += size
        phase = self.record.phase
        phase.peak_bytes = max(phase.peak_bytes, self.now)
        self.peak = max(self.peak, self.now)

    def enter(self, phase: str) -> None:
        self.record.enter(phase)
        self._peak_before = self.record.phase.peak_bytes
        self._add(0)

    def settle(self) -> None:
        """Start the phase's peak anew, after tensors that it does not use have left the device."""
        self.record.phase.peak_bytes = self._peak_before
        self._add(0)

    def reset_peak(self) -> None:
        self.peak = self.now

    def track(self, t: FakeTensor, op: str) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        line = source_line(3)
        self.live[key] = (size, line)
        self.record.phase.made[line, op] += 1
        self.order.allocate(t)
        if t.dtype is FLOAT64:
            self.record.phase.doubles[line] += 1
        weakref.finalize(storage, self._free, key).atexit = False
        self._add(size)

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key, (0, ""))[0]
        self.order.forget(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage's memory was freed, or allocated again."""
        known = self.live.get(storage._cdata)
        if known is not None:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.live[storage._cdata] = (size, known[1])
            self._add(size - known[0])

    def by_line(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for size, line in self.live.values():
            sizes[line] += size
        return sizes

    # ---- waits of the host

    def wait(self, what: str, released: Released | None = None) -> None:
        """Let the host wait for the current stream, or for what others have `released`."""
        if self.capturing:
            raise RuntimeError(f"{what} while a CUDA graph is captured")
        self.order.host.join(self.order.current.release() if released is None else released)
        self.pricing.advance()
        self.record.phase.waits[what, source_line(2)] += 1

    def read(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values that the host reads."""
        frame = sys._getframe(2)
        while frame is not None and self.answers:
            code = frame.f_code
            for (file, function), answer in self.answers.items():
                if code.co_name == function and code.co_filename.endswith(file):
                    with unset_fake_temporarily():
                        return answer(source, frame.f_locals).to(dtype)
            frame = frame.f_back
        with unset_fake_temporarily():
            size = max(1, source.numel()) * dtype.itemsize
            # a mapping's zeros take no memory before they are read; an allocator's may be old memory, which it fills
            raw = np.frombuffer(mmap.mmap(-1, size), np.uint8) if size > MAPPED else np.zeros(size, np.uint8)
            return torch.from_numpy(raw).view(dtype)[: source.numel()].view(source.shape)

    def on_host(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor on the CPU without storage."""
        with _disable_current_modes(), self.fake:
            return torch.empty(tuple(shape), dtype=dtype)

    # ---- every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else torch.device("cpu")
        kwargs = kwargs or {}
        tensors = _flat(args, _flat(list(kwargs.values()), []))
        cuda = any(on_device(t) for t in tensors)
        device = kwargs.get("device")
        target = torch.device(device).type if device is not None else ""
        if target == "cuda":
            index = torch.device(device).index
            index = torch.cuda.current_device() if index is None else index
            if index != CUDA.index:
                raise RuntimeError(f"a tensor on cuda:{index}, but this rank's device is {CUDA}")
            kwargs = kwargs | {"device": CUDA}
        if torch.is_inference_mode_enabled() and kernels.is_composite(func):
            with _Decomposed(self):
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if self.order.active and func.namespace != "c10d":
            self.order.touch(func, args, kwargs, tensors, cuda)
        if func.namespace == "c10d":
            assert self.collective is not None
            return self.collective(func, args, kwargs, cuda)
        if not cuda and target != "cuda" and not any(isinstance(t, FakeTensor) for t in tensors):
            return self._on_host(func, args, kwargs)
        op = func._overloadpacket.__name__
        if op == "_to_copy" and cuda and target == "cpu":
            return self._downloaded(func, args, kwargs)
        if op == "copy_" and on_device(args[1]) and not on_device(args[0]):
            return self._copied_out(args, kwargs)
        source = args[op == "copy_"] if op in ("_to_copy", "copy_") else None
        uploads = isinstance(source, Tensor) and not on_device(source) and (target == "cuda" or on_device(args[0]))
        if uploads and source.dim():
            self._note_upload(source, kwargs.get("non_blocking") or args[2:] == (True,))
        if op in ("index", "index_put", "index_put_", "_index_put_impl_") and cuda and not on_device(args[0]):
            raise RuntimeError("a tensor on the CPU is indexed by one on cuda")
        if cuda:
            kernels.refuse_mixed(func, tensors)
        out = self._of_values(op, func, args, kwargs) if cuda else NotImplemented
        if out is NotImplemented:
            alone = target in ("", "cuda") and all(on_device(t) for t in tensors) and kernels.plain(func)
            out = kernels.run(self.fake, func, args, kwargs) if alone else func(*args, **kwargs)
        made = [t for t in ((out,) if isinstance(out, Tensor) else tree_leaves(out)) if on_device(t)]
        for t in made:
            self.track(t, op)
        if uploads:
            self.pricing.transfer(source.nbytes)
        elif cuda or made:
            self._count(func, args, kwargs, tensors, made, out)
        return out

    def _count(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], made: list[Tensor], out: Any) -> None:
        operations, formula = 0, flop_registry.get(func._overloadpacket)
        if formula is not None:
            sizes = (*(t.shape for t in tensors), *(t.shape for t in made), *(a for a in args if isinstance(a, int)))
            if (func, sizes) not in self._operations:
                known = (a for a in args if not isinstance(a, torch.dtype))  # torch's formulas know no `out_dtype`
                with unset_fake_temporarily():
                    self._operations[func, sizes] = formula(*known, **kwargs, out_val=out)
            operations = self._operations[func, sizes]
            self.record.phase.flops += operations
        self.pricing.operation(func, args, kwargs, tensors, made, operations)

    # ---- between host and device

    def _on_host(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is aten.copy_.default and any(t.device.type == "meta" for t in args[:2]):  # parked bytes of a storage
            return args[0]
        pinned = kwargs.pop("pin_memory", False)
        large = False
        if func in FACTORIES:
            size = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", ())
            width = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            large = math.prod(size) * width > LARGE
        with unset_fake_temporarily(), self.fake if large else nullcontext():
            out = func(*args, **kwargs)
        return self.pin(out) if pinned else out

    def pin(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        self.pinned.add(storage._cdata)
        weakref.finalize(storage, self._unpin, storage._cdata).atexit = False
        return t

    def _unpin(self, key: int) -> None:
        self.pinned.discard(key)
        self.order.forget(key)

    def _downloaded(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        large = source.numel() * dtype.itemsize > LARGE
        out = func(*args, **kwargs) if large else self.read(source, dtype)
        self.pricing.transfer(source.nbytes)
        if not kwargs.get("non_blocking"):
            self.wait("copy to the host")
        else:  # into pinned memory
            self.order.mark(self.order.writes, span_of(self.pin(out)))
        return out

    def _copied_out(self, args: tuple, kwargs: dict) -> Tensor:
        into, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        self.pricing.transfer(source.nbytes)
        if non_blocking and into.untyped_storage()._cdata in self.pinned:
            self.order.mark(self.order.writes, span_of(into))
        else:  # CUDA always waits where memory is not pinned
            self.wait("copy to the host")
        if not isinstance(into, FakeTensor):
            with unset_fake_temporarily():
                into.copy_(self.read(source, into.dtype))
        return into

    def _note_upload(self, source: Tensor, non_blocking: bool) -> None:
        if source.untyped_storage()._cdata in self.pinned:
            if non_blocking:
                self.order.mark(self.order.reads, span_of(source))
        elif not isinstance(source, FakeTensor):
            self.record.phase.uploads[source_line(3)] += 1

    # ---- operations whose result, or its shape, depends on values

    def _of_values(self, op: str, func: Any, args: tuple, kwargs: dict) -> Any:
        if op == "_local_scalar_dense":
            self.pricing.transfer(args[0].nbytes)
            self.wait("a number is read (.item(), bool(), float(), int())")
            if args[0].is_floating_point():
                return 1.0
            with unset_fake_temporarily():
                return self.read(args[0], args[0].dtype).item()
        if op == "equal":
            self.wait("torch.equal")
            return True
        if op == "nonzero":
            self.wait(op)
            return self._new((args[0].numel(), args[0].dim()), torch.int64)
        if op == "masked_select":
            self.wait(op)
            return self._new((args[1].numel(),), args[0].dtype)
        if op == "bincount":
            self.wait(op)
            least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            weights = args[1] if len(args) > 1 else kwargs.get("weights")
            return self._new((max(least, 1),), torch.int64 if weights is None else weights.dtype)
        if op == "repeat_interleave" and len(_flat(args, [])) == 1 and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without output_size")
            return self._new((args[0].numel(),), torch.int64)
        if op not in ("index", "index_put_", "_index_put_impl_"):
            return NotImplemented
        if not any(i is not None and i.dtype is torch.bool for i in args[1]):
            return NotImplemented
        if op == "index":
            self.wait("index by a mask")
            return func(args[0], [x for i in args[1] for x in self._indices(i)])
        if args[2].numel() > 1 or on_device(args[2]):
            self.wait("assignment by a mask")
        return args[0]

    def _indices(self, index: Tensor | None) -> list[Tensor | None]:
        if index is None or index.dtype is not torch.bool:
            return [index]
        return [self._new((index.numel(),), torch.int64) for _ in range(index.dim())]

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return aten.empty.memory_format(list(shape), dtype=dtype, device=CUDA)


class _Decomposed(TorchDispatchMode):
    """The same device, for the operations of a composite one."""

    def __init__(self, device: RehearsedDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.device.__torch_dispatch__(func, types, args, kwargs)
