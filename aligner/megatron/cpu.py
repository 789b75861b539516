"""Run Megatron-Core without a GPU: the CUDA calls it makes at run time are redirected to the CPU.

Inert where CUDA exists. The redirections name what Megatron-Core 0.19 calls on the paths used here (models, schedules,
distributed data parallel, optimizers, distributed checkpoints), so a version that was not tested is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from typing import Any

import torch

from aligner.cluster.memory_pages import keep_freed_memory
from aligner.errors import AlignerError

TESTED_VERSIONS = ("0.19.2",)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint")
_FACTORIES += ("zeros_like", "empty_like")
_installed = False


def install() -> bool:
    """Redirect CUDA calls if there is no CUDA device. Returns whether the CPU replaces it. Idempotent."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    version = importlib.metadata.version("megatron-core")
    if version not in TESTED_VERSIONS:
        raise AlignerError(
            f"megatron-core {version} was not tested on the CPU: install {' or '.join(TESTED_VERSIONS)}, or use a GPU"
        )
    keep_freed_memory()
    _redirect_device_calls()
    _redirect_rng()
    _redirect_streams()
    _redirect_tensors()
    _installed = True
    return True


def _redirect_device_calls() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    torch.cuda.memory_allocated = lambda device=None: 0
    torch.cuda.max_memory_allocated = lambda device=None: 0
    torch.cuda.nvtx.range_push = lambda *args, **kwargs: 0
    torch.cuda.nvtx.range_pop = lambda: 0


def _redirect_rng() -> None:
    def get_state(device: Any = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.random.set_rng_state(state)

    def seed(value: int) -> None:
        torch.random.default_generator.manual_seed(value)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state, module.manual_seed = get_state, set_state, seed


class _Stream:
    """A stream and an event in one: everything on the CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.device = torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True


def _redirect_streams() -> None:
    stream = _Stream()
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda s: contextlib.nullcontext()
    torch.cuda.set_stream = lambda s: None


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", None) == "cuda"


def _redirect_tensors() -> None:
    # `with torch.device(...)` knows the factories by identity, from its first use on: let it see the real ones. Else
    # transformers' from_pretrained, in this process, would leave the buffers it makes on "meta" uninitialised.
    with torch.device("meta"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (torch.device("cpu"), *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return original_to(self, *args, **kwargs)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        # The optimizers read the type by name and know only CUDA's; other callers get the true one.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.to, torch.Tensor.type = to, type_
    torch.cuda.FloatTensor, torch.cuda.HalfTensor = torch.FloatTensor, torch.HalfTensor
    torch.cuda.BFloat16Tensor = torch.BFloat16Tensor
    torch.cuda.IntTensor, torch.cuda.LongTensor = torch.IntTensor, torch.LongTensor


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return wrapped
