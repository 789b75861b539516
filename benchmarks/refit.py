"""The refit against a plain copy of the same bytes: bytes, seconds and GB/s by layout pair and model size.

    python -m benchmarks.refit [--models 25m,100m] [--pairs NAME,...] [--repeats 11] [--bucket-bytes N] [--json FILE]

Trainer and engines are real, on gloo ranks of this machine, float32. Each repeat times one refit and one copy of as
many bytes as a rank's engine receives, from one flat tensor to another. They alternate, on all ranks at once, and each
ends when all ranks know that all have done it. The table has medians; the ratio is the median of the repeats' ratios.
Exit code 1 if a refit in which every rank holds what its engine needs takes more than twice the copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig

if TYPE_CHECKING:
    from aligner.engines.bridge import Bridge

LIMIT = 2.0  # x the plain copy, where each rank already holds what its engine needs
# 3 MB are copied within the processor's cache in 0.2 ms, less than 38 tensors take to be named: not of the default
SIZES = {  # hidden size, FFN, layers, vocabulary
    "quickstart": (128, 384, 4, 91),
    "25m": (512, 1408, 6, 8000),
    "100m": (768, 2048, 12, 32000),
}


@dataclass(frozen=True)
class Pair:
    world: int
    trainer: ParallelConfig
    engine_tensor: int
    same: bool  # each rank holds what its engine needs
    apart: int = 0  # so many last ranks only have engines


PAIRS = {
    "one rank": Pair(1, ParallelConfig(), 1, True),
    "dp2 to 2 x tp1": Pair(2, ParallelConfig(), 1, True),
    "tp2 to 1 x tp2": Pair(2, ParallelConfig(tensor=2), 2, True),
    "dp2 to 1 x tp2": Pair(2, ParallelConfig(), 2, True),
    "tp2 to 2 x tp1": Pair(2, ParallelConfig(tensor=2), 1, False),
    "pp2 to 2 x tp1": Pair(2, ParallelConfig(pipeline=2), 1, False),
    "pp2 to 1 x tp2": Pair(2, ParallelConfig(pipeline=2), 2, False),
    "one rank to another": Pair(2, ParallelConfig(), 1, False, apart=1),
}


def model_of(size: str) -> ModelConfig:
    hidden, ffn, layers, vocabulary = SIZES[size]
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_heads=8, num_kv_heads=4, vocab_size=vocabulary
    )


def measure(size: str, name: str, repeats: int, bucket_bytes: int) -> dict | None:
    """Measure on every rank of the pair's world: bytes of this rank's engine, and (refit seconds, copy seconds) by
    repeat; None on a rank that only has an engine."""
    import torch
    import torch.distributed as dist

    from aligner.engines.bridge import Bridge
    from aligner.engines.native.engine import NativeEngine
    from aligner.engines.native.remote import RemoteEngine
    from aligner.megatron.groups import build_layout, neighbours, split_world
    from aligner.megatron.model import Head
    from aligner.megatron.train import ShardedModel
    from aligner.megatron.weights import random_source
    from aligner.refit.transfer import Refit, any_rank

    cfg, device, pair = model_of(size), torch.device("cpu"), PAIRS[name]
    config = RefitConfig(bucket_bytes=bucket_bytes)
    bridge = Bridge(*split_world(pair.apart), pair.world - pair.apart) if pair.apart else None
    if bridge is not None and bridge.generates:
        return serve(cfg, bridge, pair, config)
    layout = build_layout(pair.trainer)
    model = ShardedModel(cfg, layout, Head(), torch.float32, device, random_source(cfg, 0))
    if bridge is not None:
        engine = RemoteEngine(bridge, pair.engine_tensor, torch.float32)
    else:
        group = neighbours(pair.engine_tensor)
        engine = NativeEngine(cfg, EngineConfig(), device=device, dtype=torch.float32, pad_id=0, group=group)
    refit = Refit(model, engine, config)
    first = refit()
    source = torch.ones(int(first["refit/bytes"]) // 4)
    target, times = torch.zeros_like(source), []
    for _ in range(repeats + 1):
        pair_s = []
        for action in (lambda: refit(again=True), lambda: (target.copy_(source), any_rank(False, device, 60.0))):
            dist.barrier()
            start = time.perf_counter()
            action()
            pair_s.append(time.perf_counter() - start)
        times.append(tuple(pair_s))
    if bridge is not None:
        bridge.dismiss(True)
    return {"bytes": first["refit/bytes"], "wire_bytes": first["refit/wire_bytes"], "times": times[1:]}


def serve(cfg: ModelConfig, bridge: Bridge, pair: Pair, config: RefitConfig) -> None:
    """Serve refits on a rank that only has an engine."""
    import torch

    from aligner.engines.native.fleet import FleetEngine
    from aligner.megatron.groups import neighbours
    from aligner.refit.plan import EngineGrid, TrainerGrid
    from aligner.refit.serve import OrderServer
    from aligner.refit.transfer import planned

    device, dtype, p, group = torch.device("cpu"), torch.float32, pair.trainer, neighbours(pair.engine_tensor)
    engine = FleetEngine(cfg, EngineConfig(), device=device, dtype=dtype, pad_id=0, group=group)
    trainer = TrainerGrid.of(cfg, p, bridge.trainers // p.model_size)
    engines, none = EngineGrid(bridge.engines, pair.engine_tensor), lambda name: nullcontext()
    plan = partial(planned, trainer, engines, cfg, (dtype, dtype), device, config, bridge)
    OrderServer(bridge, engine, plan, config, none, none, lambda: None)()
    bridge.leave(True)


def row(size: str, name: str, results: list[dict | None]) -> dict:
    results = [result for result in results if result is not None]
    repeats = list(zip(*(result["times"] for result in results), strict=True))
    refits = [max(seconds for seconds, _ in ranks) for ranks in repeats]
    copies = [max(seconds for _, seconds in ranks) for ranks in repeats]
    moved, seconds = max(result["bytes"] for result in results), statistics.median(refits)
    ratio = statistics.median(a / b for a, b in zip(refits, copies, strict=True))
    return {
        "model": size,
        "layouts": name,
        "bytes": moved,
        "wire_bytes": max(result["wire_bytes"] for result in results),
        "seconds": seconds,
        "gb_per_s": moved / seconds / 1e9,
        "copy_seconds": statistics.median(copies),
        "ratio": ratio,
        "same": PAIRS[name].same,
    }


def main(arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.common import write_json
    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(prog="python -m benchmarks.refit", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="25m,100m", help=f"of {','.join(SIZES)}")
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--bucket-bytes", type=int, default=RefitConfig().bucket_bytes)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks, rows = Ranks(max(pair.world for pair in PAIRS.values())), []
    try:
        for size in options.models.split(","):
            for name in options.pairs.split(","):
                job = {"size": size, "name": name, "repeats": options.repeats, "bucket_bytes": options.bucket_bytes}
                rows.append(row(size, name, ranks.run("benchmarks.refit:measure", world=PAIRS[name].world, **job)))
    finally:
        ranks.close()
    columns = ("model", "trainer to engines", "MB a rank", "of it from others", "ms", "GB/s", "x copy")
    table = Table(*columns, title="refit, gloo, float32; copy: the same bytes, flat, in the same repeats")
    for r in rows:
        mark = "" if not r["same"] else " ok" if r["ratio"] <= LIMIT else f" > {LIMIT:g}"
        cells = [f"{r['bytes'] / 1e6:.1f}", f"{r['wire_bytes'] / 1e6:.1f}", f"{1e3 * r['seconds']:.1f}"]
        table.add_row(r["model"], r["layouts"], *cells, f"{r['gb_per_s']:.2f}", f"{r['ratio']:.2f}{mark}")
    Console(width=110).print(table)
    write_json(options.json, {"rows": rows})
    return int(any(r["same"] and r["ratio"] > LIMIT for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
