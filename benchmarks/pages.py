"""Rows with pages beside whole rows in the same memory (`engine.page_tokens`), for lengths with a long tail.

    python -m benchmarks.pages [--pages 0,16,64] [--rows 128] [--json FILE]

A random model stops with the same probability after each token, on average after an eighth of the longest response. The
cache has room for 8 whole rows. CPU seconds are the process's, of a second generation.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native import NativeEngine
from aligner.types import SamplingParams
from benchmarks.common import write_json

MODEL = ModelConfig(
    family="llama",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=128,
    max_position=2048,
)
LIMIT, PROMPT, FIT = 1024, 16, 8


def engine_of(page: int) -> NativeEngine:
    config = EngineConfig(page_tokens=page, cuda_graphs=False)
    engine = NativeEngine(MODEL, config, device="cpu", dtype=torch.float32, pad_id=0)
    tokens = FIT * (LIMIT + PROMPT - 1) * 4 // 3  # a quarter is for prompts that wait
    config.kv_cache_bytes = tokens * engine.cache.token_bytes
    draw = torch.Generator().manual_seed(0)
    engine.begin_update(0)
    engine.update_weights((name, 0.02 * torch.randn(s, generator=draw)) for name, s in engine.model.shapes.items())
    engine.finish_update()
    return engine


def measured(page: int, rows: int) -> dict[str, float]:
    """Return the figures of a line."""
    engine = engine_of(page)
    prompts = [[(7 * i + j) % 127 + 1 for j in range(PROMPT)] for i in range(rows // 8)]
    seeds = [[8 * i + j for j in range(8)] for i in range(rows // 8)]
    for _ in range(2):
        begin = time.process_time()
        out = engine.generate(prompts, seeds, SamplingParams(LIMIT, stop_token_ids=(0,)))
        seconds = time.process_time() - begin
    stats, lengths = engine.stats, out.lengths.float()
    most = int(lengths.max())
    figures = {"page": page, "rows": stats.decoded_rows / stats.steps, "steps": stats.steps, "cpu_s": seconds}
    return figures | {"paused": stats.paused_rows, "mean": float(lengths.mean()), "longest": most}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--pages", default="0,16,64", help="page sizes in tokens")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print("| page | mean rows decoded together | steps | CPU s | paused | mean length | longest |\n|" + "---|" * 7)
    lines = [measured(int(page), options.rows) for page in options.pages.split(",")]
    for one in lines:
        print(f"| {' | '.join(f'{value:.4g}' for value in one.values())} |")
    write_json(options.json, {"lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
