"""One engine of `benchmarks.versus_vllm`. It generates a rollout for each line on its input and prints its seconds and
tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.engine import NativeEngine
from aligner.engines.vllm.engine import VllmEngine
from aligner.models.params import expected_hf_shapes
from aligner.types import SamplingParams
from benchmarks.versus.workload import SIZES, Work

ENGINES = {"native": NativeEngine, "vllm": VllmEngine}


def make(work: Work, name: str) -> NativeEngine | VllmEngine:
    """Return an engine with random weights, the same for both."""
    size, dtype = SIZES[work.size], getattr(torch, work.dtype)
    model = ModelConfig(
        family="llama",
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocab,
        max_position=1024,
    )
    engine = ENGINES[name](model, EngineConfig(name=name, max_batch=work.samples), device="cpu", dtype=dtype, pad_id=0)
    generator = torch.Generator().manual_seed(work.seed)
    engine.begin_update(1)
    for tensor, shape in expected_hf_shapes(model).items():
        value = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        engine.update_weights([(tensor, value)])
    engine.finish_update()
    return engine


def peak_bytes(processes: list[psutil.Process]) -> int:
    """Return the sum of the processes' largest resident sets."""
    lines = (Path(f"/proc/{p.pid}/status").read_text().split("VmHWM:")[1] for p in processes)
    return sum(1024 * int(line.split()[0]) for line in lines)


def cpu_seconds(own: psutil.Process) -> float:
    """Return the CPU seconds of all threads of this process, and of its children."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in (own, *own.children(recursive=True))))


def main(path: str, name: str) -> None:
    work = Work.read(Path(path))
    torch.set_num_threads(work.threads)
    engine, own = make(work, name), psutil.Process()
    generator = torch.Generator().manual_seed(work.seed)
    shape = work.samples // work.group, work.prompt_tokens
    prompts = torch.randint(3, SIZES[work.size].vocab, shape, generator=generator).tolist()
    for call, _ in enumerate(sys.stdin):
        seeds = [[1000 * call + i * work.group + j for j in range(work.group)] for i in range(len(prompts))]
        start = cpu_seconds(own)
        out = engine.generate(prompts, seeds, SamplingParams(work.max_response))
        measured = {"seconds": cpu_seconds(own) - start, "tokens": int(out.lengths.sum())}
        print(json.dumps(measured | {"peak_bytes": peak_bytes(own.children() or [own])}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
