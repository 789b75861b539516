"""Decode passes and CPU seconds with drafts (`engine.draft_tokens`), of a model that learned to add in steps.

    python -m benchmarks.drafts [--size 30m] [--folder DIR] [--json FILE]

Trains a model of GLM-4.5's form with its layer for multi-token prediction by stage sft on eight rows a step, or takes
the one that is in DIR already. Then its native engine, one thread, float32, temperature 1, answers the same prompts
without drafts, by lookup, and by the layer; all tokens must be the same. CPU seconds are the least of three
generations, which alternate.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.data.tokenizer import byte_tokenizer, load_tokenizer
from aligner.engines.native import NativeEngine
from aligner.engines.native.engine import EngineStats
from aligner.engines.native.load import fill
from aligner.families.hf_config import config_from_hf
from aligner.run.metrics import read_jsonl
from aligner.types import SamplingParams
from benchmarks.common import write_json
from benchmarks.versus.workload import SIZES

TRAINING = {"3m": (300, 2e-3), "30m": (250, 1e-3), "120m": (150, 6e-4)}  # steps, learning rate
# by name: `engine.draft_tokens`, `model.mtp.layers`
SOURCES = {"none": (0, 0), "lookup, 3": (3, 0)} | {f"layer, {k}": (k, 1) for k in (1, 3, 5)}
CASES = {"8 rows, one after the other": (8, 1, 1.0), "32 rows at once": (32, 32, 1.0), "32 rows, greedy": (32, 32, 0.0)}
LIMIT, ROUNDS = 80, 3


@dataclass(frozen=True)
class Result:
    rows: list[list[int]]  # their tokens
    stats: EngineStats
    cpu_s: float


def sum_row(draw: random.Random) -> dict[str, str]:
    total, added = draw.randrange(10, 100), draw.randrange(2, 10)
    sums = [f"{total + i * added}+{added}={total + (i + 1) * added}" for i in range(8)]
    return {"prompt": f"{total}+{added}, 8 times: ", "completion": "; ".join(sums)}


def make_data(folder: Path) -> None:
    draw = random.Random(0)
    for name, count in (("train", 20_000), ("valid", 32)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(sum_row(draw)) + "\n" for _ in range(count)))
    byte_tokenizer(str(folder / "tokenizer"))


def train(folder: Path, size: str) -> None:
    s, (steps, rate) = SIZES[size], TRAINING[size]
    shape = {
        "num_layers": s.layers,
        "hidden_size": s.hidden,
        "ffn_hidden_size": s.ffn,
        "num_heads": s.heads,
        "num_kv_heads": s.kv_heads,
        "vocab_size": s.vocab,
        "family": "glm4_moe",
        "tie_embeddings": "false",
        "qkv_bias": "true",
        "attention.rotary_fraction": 0.5,
        "moe.num_experts": 4,
        "moe.top_k": 2,
        "moe.ffn_hidden_size": s.ffn // 4,
        "moe.shared_ffn_hidden_size": s.ffn // 2,
        "moe.dense_layers": list(range(s.layers - 1)),
        "mtp.layers": 1,
        "mtp.detach": "true",
        "tokenizer": folder / "tokenizer",
    }
    command = [sys.executable, "-m", "aligner", "run", "stage=sft", f"run.dir={folder}/run", f"run.steps={steps}"]
    command += [f"data.train={folder}/train.jsonl", "data.max_prompt_tokens=24", "data.max_tokens=96"]
    command += ["batch.sequences=8", "batch.micro_batch_samples=8", f"optim.lr={rate}", "optim.warmup_steps=20"]
    command += ["cluster.threads=1", "checkpoint.final=false", "run.export=true", "model.dtype=float32"]
    command += [f"model.{key}={value}".replace(" ", "") for key, value in shape.items()]
    subprocess.run(command, check=True)


def engine_of(model: Path, source: str) -> NativeEngine:
    """Return an engine that has room for drafts of all rows."""
    tokens, layers = SOURCES[source]
    shape = replace(config_from_hf(model), mtp=MtpConfig(layers))
    config = EngineConfig(max_batch=256, kv_cache_bytes=1 << 30, draft_tokens=tokens)
    engine = NativeEngine(shape, config, device="cpu", dtype=torch.float32, pad_id=0)
    fill(engine, model)
    return engine


def answered(engine: NativeEngine, prompts: list[list[int]], together: int, sampling: SamplingParams) -> Result:
    """Answer `together` prompts at a time."""
    rows, stats = [], EngineStats()
    begin = time.process_time()
    for first in range(0, len(prompts), together):
        some = prompts[first : first + together]
        out = engine.generate(some, [[first + row] for row in range(len(some))], sampling)
        rows += [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]
        stats = stats.with_later(engine.stats)
    return Result(rows, stats, time.process_time() - begin)


def compare(folder: Path) -> list[dict[str, Any]]:
    """Return a line for each source and case."""
    model, tokenizer = folder / "run" / "hf", load_tokenizer(str(folder / "tokenizer"))
    rows = read_jsonl(folder / "valid.jsonl")
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    engines = {source: engine_of(model, source) for source in SOURCES}
    lines = []
    for case, (count, together, temperature) in CASES.items():
        sampling = SamplingParams(LIMIT, temperature=temperature, stop_token_ids=(tokenizer.eos_token_id,))
        runs: dict[str, list[Result]] = {source: [] for source in SOURCES}
        for _ in range(ROUNDS):
            for source, engine in engines.items():
                runs[source].append(answered(engine, prompts[:count], together, sampling))
        for source, results in runs.items():
            if any(result.rows != runs["none"][0].rows for result in results):
                raise SystemExit(f"{source}, {case}: other tokens than without drafts")
            stats = results[0].stats
            line = {"case": case, "source": source, "passes": stats.steps, "cpu_s": min(r.cpu_s for r in results)}
            lines.append(line | {"accepted": stats.accepted_tokens / max(1, stats.drafted_tokens)})
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="3m")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "run" / "hf").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_data(folder)
            train(folder, options.size)
        lines = compare(folder)
    print("| rows | source, k | passes | CPU s | drafts accepted |\n|" + "---|" * 5)
    for line in lines:
        figures = f"{line['passes']} | {line['cpu_s']:.2f} | {line['accepted']:.2f}"
        print(f"| {line['case']} | {line['source']} | {figures} |")
    write_json(options.json, {"lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
