"""Both TensorRT-LLM engines over the strict fake: in a process of its own, or in a thread of this one, which starts
sooner."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import threading
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.serve import serve
from aligner.engines.trtllm.built import TrtllmBuiltEngine
from aligner.engines.trtllm.torch_backend import TrtllmEngine

FAKE = Path(__file__).parent / "fake"
ROOT = Path(__file__).parents[3]


class ThreadChild:
    """The other end of a connection, in a thread."""

    def __init__(self, connection, worker: str):
        self.thread = threading.Thread(target=serve, args=(connection, pkgutil.resolve_name(worker)), daemon=True)
        self.thread.start()

    def ended(self) -> str:
        return "" if self.thread.is_alive() else "ended"

    def last_words(self) -> str:
        return ""

    def stop(self, wait_s: float) -> None:
        self.thread.join(wait_s)


def start_thread(worker, device, python):
    ours, theirs = Pipe()
    return ThreadChild(theirs, worker), ours


def use_fake(monkeypatch, **settings: str) -> None:
    """Makes `import tensorrt_llm` find the fake, here and in children; settings: its FAKE_TRTLLM_* variables."""
    forget_fake()
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    for name, value in settings.items():
        monkeypatch.setenv(f"FAKE_TRTLLM_{name.upper()}", value)
    importlib.invalidate_caches()


def forget_fake() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tensorrt_llm", "tensorrt", "pydantic")]:
        del sys.modules[name]


def make_engine(cfg, decode=None, *, kind=TrtllmEngine, process=False, bucket_bytes=2048, **config):
    options = {k: config.pop(k) for k in list(config) if k in TrtllmConfig.__dataclass_fields__}
    fields = {k: config.pop(k) for k in ("checksums", "group") if k in config}
    dtype = config.pop("dtype", torch.float32)
    settings = EngineConfig(name=kind.name, trtllm=TrtllmConfig(**options), **config)
    start = {} if process else {"start": partial(start_thread, kind.worker)}
    return kind(
        cfg,
        settings,
        device="cpu",
        dtype=dtype,
        pad_id=0,
        decode=decode,
        bucket_bytes=bucket_bytes,
        **fields,
        **start,
    )


def make_built(cfg, decode=None, **config):
    """One that is built, of `engine=trtllm_engine`."""
    config = {"prefix_reuse": False} | config
    return make_engine(cfg, decode, kind=TrtllmBuiltEngine, **config)


def other_python(folder: Path) -> Path:
    """An interpreter that alone finds the fake."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{FAKE}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script
