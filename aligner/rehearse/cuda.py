"""`torch.cuda` without a driver, as the program, Megatron and torch's autograd call it. Patches stay in this
process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from aligner.errors import AlignerError
from aligner.ops.kernels import fused
from aligner.rehearse import attention, kernels, linear
from aligner.rehearse.device import CUDA, RehearsedDevice, on_device
from aligner.rehearse.order import Order, Released, Timeline, span_of

TESTED = "2.13.0"
HAS_CONTEXT = 4  # of AcceleratorHooksInterface's virtual functions: two destructors, isBuilt, init, hasPrimaryContext
CAPABILITIES = {
    "a100": (8, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "gb300": (10, 3),
}
_kept: list[Any] = []  # objects that C++ points to


def install(device: RehearsedDevice, kind: str) -> None:
    """Install the patches. Raises AlignerError for a torch with unknown internals."""
    if torch.__version__.split("+")[0] != TESTED:
        raise AlignerError(f"torch {torch.__version__}: a rehearsal needs {TESTED}, whose internals it stands in for")
    torch._C._ensureCUDADeviceGuardSet()
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign,assignment]
    torch.autograd.set_multithreading_enabled(False).__enter__()  # else C++ makes a thread for each device it counts
    _no_contexts()
    _calls(device, CAPABILITIES.get(kind, (9, 0)), kind)
    _streams(device)
    _graphs(device)
    _tensors(device)
    attention.install(device)
    kernels.install()
    linear.install()
    fused.DEVICES.add(CUDA.type)  # without Triton too, which a GPU has: nothing is launched


def _no_contexts() -> None:
    """Report no context for any device: backward asks CUDA's hooks for them, which would look for a driver."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    find = library._ZN2at6detail12getCUDAHooksEv
    find.restype = ctypes.c_void_p
    hooks = find()
    table, before, size = ctypes.c_void_p.from_address(hooks).value, 2, 128
    words = (ctypes.c_void_p * (size + before)).from_address(table - before * 8)
    copy = (ctypes.c_void_p * (size + before))(*words)
    never = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda this, index: False)
    copy[before + HAS_CONTEXT] = ctypes.cast(never, ctypes.c_void_p).value
    _kept.extend([copy, never])
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(copy) + before * 8


def _calls(device: RehearsedDevice, capability: tuple[int, int], kind: str) -> None:
    cuda, memory = torch.cuda, device.memory_bytes
    name = f"{kind} (rehearsed)"
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory, multi_processor_count=132
    )
    answers = {
        "is_available": True,
        "is_initialized": False,  # else FakeTensorMode asks the driver
        "device_count": 8,
        "is_bf16_supported": True,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": name,
        "graph_pool_handle": (0, 0),
    }
    answers |= dict.fromkeys(("init", "_lazy_init", "empty_cache", "ipc_collect"))
    for function, value in answers.items():
        setattr(cuda, function, lambda *a, _value=value, **k: _value)
    cuda.current_device = torch._C._accelerator_getDeviceIndex  # of this thread
    cuda.set_device = lambda index: torch._C._accelerator_setDeviceIndex(torch.device(index).index)

    def synchronize(*a: Any) -> None:
        device.wait("torch.cuda.synchronize")
        device.order.synchronize()

    cuda.synchronize = synchronize
    cuda.mem_get_info = lambda *a: (memory - device.now, memory)
    cuda.memory_allocated = cuda.memory_reserved = lambda *a: device.now
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *a: device.peak
    cuda.reset_peak_memory_stats = lambda *a: device.reset_peak()
    cuda.device = lambda index: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: 0

    def state(*a: Any, **k: Any) -> Tensor:
        with unset_fake_temporarily():
            return torch.random.default_generator.get_state()

    for module in (cuda, cuda.random):
        module.get_rng_state = state
        module.set_rng_state = module.manual_seed = module.manual_seed_all = lambda *a, **k: None


def _streams(device: RehearsedDevice) -> None:
    order = device.order

    class FakeStream(Timeline):
        device, cuda_stream = CUDA, 0

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__()
            order.stream(self)

        def wait_stream(self, other: Timeline) -> None:
            self.join(other.release())

        def wait_event(self, event: FakeEvent) -> None:
            self.join(event.released)

        def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
            event = event or FakeEvent()
            event.record(self)
            return event

        def synchronize(self) -> None:
            device.wait("stream synchronize", self.release())

        def query(self) -> bool:
            order.host.join(self.release())
            return True

    class FakeEvent:
        def __init__(self, *arguments: Any, **options: Any):
            self.released = Released({}, 0.0)

        def record(self, stream: Timeline | None = None) -> None:
            self.released = (stream or order.current).release()

        def wait(self, stream: Timeline | None = None) -> None:
            (stream or order.current).join(self.released)

        def synchronize(self) -> None:
            device.wait("event synchronize", self.released)

        def query(self) -> bool:
            order.host.join(self.released)
            return True

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    order.default.__class__ = FakeStream  # without a second stream
    torch.cuda.Stream, torch.cuda.Event = FakeStream, FakeEvent  # type: ignore[misc,assignment]
    _current_stream(order)


def _current_stream(order: Order) -> None:
    @contextlib.contextmanager
    def within(stream: Timeline | None) -> Iterator[None]:
        before = order.current
        switch(stream or before)
        try:
            yield
        finally:
            switch(before)

    def switch(stream: Timeline) -> None:
        order.current = stream

    torch.cuda.current_stream, torch.cuda.default_stream = lambda *a: order.current, lambda *a: order.default
    torch.cuda.stream, torch.cuda.set_stream = within, switch
    Tensor.record_stream = lambda self, stream: order.recorded.add((self.untyped_storage()._cdata, stream))  # type: ignore


def _graphs(device: RehearsedDevice) -> None:
    class Graph:
        def replay(self) -> None:
            return None

    @contextlib.contextmanager
    def capture(graph: Graph, **options: Any) -> Iterator[None]:
        device.capturing = True
        try:
            yield
        finally:
            device.capturing = False

    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture  # type: ignore[misc,assignment]
    torch.cuda.is_current_stream_capturing = lambda: device.capturing


def _tensors(device: RehearsedDevice) -> None:
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    torch.tensor = _from_data(device, torch.tensor)
    resize, storage_address, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr, Tensor.data_ptr

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        out = resize(self, size)
        device.resized(self)
        return out

    # addresses tell tensors apart, also those without storage
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
    torch.UntypedStorage.data_ptr = lambda self: self._cdata if self.device.type == "meta" else storage_address(self)
    Tensor.data_ptr = lambda self: (
        self.untyped_storage()._cdata + self.storage_offset() * self.element_size()
        if isinstance(self, FakeTensor)
        else address(self)
    )
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]
    Tensor.pin_memory = lambda self, *a: device.pin(self.clone())  # type: ignore[method-assign]
    for name in ("tolist", "numpy"):  # the host reads where no mode sees it
        setattr(Tensor, name, _on_host(device, getattr(Tensor, name)))


def _on_host(device: RehearsedDevice, original: Any) -> Any:
    @functools.wraps(original)
    def read(self: Tensor, *arguments: Any, **options: Any) -> Any:
        if device.order.writes:
            device.order.check_written(span_of(self), device.order.host)
        return original(self, *arguments, **options)

    return read


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Move a module's tensors like `Module.to` and `cuda`, which swap tensors in place, as weak references to tensors
    do not allow."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, param in self._parameters.items():
        if param is not None:
            with torch.no_grad():
                moved = fn(param)
            if moved is not param:
                self._parameters[name] = new = torch.nn.Parameter(moved.detach(), param.requires_grad)
                new.__dict__.update(param.__dict__ | new.__dict__)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _from_data(device: RehearsedDevice, original: Any) -> Any:
    """Wrap `torch.tensor`, which reads numbers, also those of device tensors, where no mode sees it."""

    def read(value: Any) -> Any:
        if on_device(value):
            return value.item()
        return [read(each) for each in value] if isinstance(value, list | tuple) else value

    @functools.wraps(original)
    def tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **k: Any) -> Tensor:
        with torch.inference_mode(False):
            made = original(read(data) if isinstance(data, list | tuple) else data, dtype=dtype, **k)
        if device is not None:
            made = made.to(device)
        return made.requires_grad_(requires_grad)

    return tensor
