"""TransformerEngine's own Python on the CPU, over a stand-in for its extension: imported before anything else that
imports Megatron, in a process that has nothing else to do. `launchers/te_python.sh` gets the package."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".te-python"
USED = re.compile(r"\btex\.([a-z]\w*)")  # functions of the extension; some are imported by a star
ASKS = ("transformer_engine", "aligner.megatron.transformer_engine")


def is_there() -> bool:
    return (FOLDER / "transformer_engine").is_dir()


class _Anything(types.ModuleType):
    """For a package that only exports to ONNX need: decorates what asks, and is otherwise a name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Anything("called")

    def __getitem__(self, key: Any) -> Any:
        return self


def install() -> None:
    """The package's own code runs, as it would on a GPU of this kind: only its extension is another one."""
    sys.path.append(str(FOLDER))
    for name in ("onnxscript", "onnx"):
        sys.modules[name] = _Anything(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)  # torch asks for it
    _like_a_gpu()
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else it looks for CUDA's libraries
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # a minute of a C++ compiler's time, for kernels that are not compared
    spec = importlib.util.find_spec("transformer_engine")
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    extension = sys.modules["transformer_engine_torch"] = importlib.import_module("tests.megatron.te_extension")
    sources = (FOLDER / "transformer_engine/pytorch").rglob("*.py")
    names = {name for file in sources for name in USED.findall(file.read_text())}
    extension.__all__ = sorted(names | {name for name in vars(extension) if name[0].islower()})
    spec.loader.exec_module(package)
    _choose_attention()
    _without_cuda()


def _like_a_gpu() -> None:
    """To the package alone: everybody else sees a CPU."""

    def to_it(answer: Any, others: Any) -> Any:
        def answered(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return answer if caller.startswith(ASKS) else others(*args, **options)

        return answered

    is_cuda = torch.Tensor.is_cuda.__get__
    torch.Tensor.is_cuda = property(to_it(True, is_cuda))
    properties = SimpleNamespace(name="stand-in", major=9, minor=0, multi_processor_count=132)
    answers = {"is_available": True, "get_device_properties": properties, "is_current_stream_capturing": False}
    for name, answer in answers.items():
        setattr(torch.cuda, name, to_it(answer, getattr(torch.cuda, name)))
    together = torch.distributed._coalescing_manager  # which gloo lacks
    torch.distributed._coalescing_manager = to_it(contextlib.nullcontext(), together)


def _choose_attention() -> None:
    """What the package chooses for bfloat16, also for the float32 in which the tests compare."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, dot_product_attention, utils

    choose, zeros = utils.get_attention_backend, torch.zeros

    utils.get_attention_backend = lambda params: choose(dataclasses.replace(params, qkv_dtype=torch.bfloat16))
    dot_product_attention.torch = SimpleNamespace(**vars(torch))
    dot_product_attention.torch.zeros = lambda *size, device: zeros(*size)  # it names the device
    source, known = inspect.getsource(backends.FusedAttention), "[torch.float16, torch.bfloat16]"
    assert source.count(known) == 1
    exec(source.replace(known, "[torch.float16, torch.bfloat16, torch.float32]"), backends.__dict__)
    dot_product_attention.FusedAttention = backends.FusedAttention


def _without_cuda() -> None:
    """What its recomputation asks of CUDA."""
    from transformer_engine.pytorch import distributed

    distributed._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
