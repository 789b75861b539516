"""Each phase of a step over its floor: the seconds that its operations or its bytes need at this machine's best rates.

    python -m benchmarks.floors [--models quickstart,3m,30m] [--dtype float32] [--repeats 7] [--json FILE]

Trainer and engine are real, on one rank, with random weights. Floors are the formulas of `aligner plan` at the rates of
matrix products and of memory copies. The rates are measured before and after every phase in every repeat, so that what
slows the phase slows them too. The table has medians of the repeats' ratios. With one thread, seconds are CPU seconds.

The rate of products is the best of a large square product and of the phase's own shapes. `own shapes` is the share of
the phase's time that its products need at the rate of those shapes: the rest of it is not products. Copies are of as
many bytes as the phase moves. Prefill and decode find matrices that are laid out for their products already. Exit
code 1 if a refit beyond the processor's cache takes more than twice a copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from aligner.families.table import parameters
from benchmarks.common import cache_bytes, write_json
from benchmarks.floor_phases import PHASES, WORKS, Subject

LIMIT = 2.0  # x a plain copy: a refit whose bytes are not in the cache


def summary(name: str, phase: str, dtype: str, element: int, repeats: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians over repeats; ratios are paired."""
    row: dict[str, Any] = {"model": name, "dtype": dtype, "phase": phase}
    row |= {key: statistics.median(r[key] for r in repeats) for key in repeats[0]}
    row["ratio"] = statistics.median(r["floor_s"] / r["seconds"] for r in repeats)
    row["own_shapes"] = statistics.median(r["own_shapes_s"] / r["seconds"] for r in repeats)
    row["bound"] = "products" if row["products_s"] >= row["memory_s"] else "memory"
    if phase == "refit":
        row["bytes"] = parameters(WORKS[name].cfg) * element
        row["x_copy"] = statistics.median(r["seconds"] / r["floor_s"] for r in repeats)
        row["pack_x_copy"] = statistics.median(r["pack_s"] / r["floor_s"] for r in repeats)
        row["judged"] = row["bytes"] > cache_bytes()
    return {key: value if value != float("inf") else None for key, value in row.items()}


def measure(name: str, dtype: str, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    kind = getattr(torch, dtype)
    subject = Subject(WORKS[name], kind, device)
    subject.repeat()  # makes buffers
    repeated = [subject.repeat() for _ in range(repeats)]
    subject.bench.close()
    return [summary(name, phase, dtype, kind.itemsize, [r[phase] for r in repeated]) for phase in PHASES]


def too_slow(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{r['model']}: a refit of {r['bytes'] / 1e6:.0f} MB takes {r['x_copy']:.2f} x a plain copy: above {LIMIT:g}"
        for r in rows
        if r.get("judged") and r["x_copy"] > LIMIT
    ]


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("model", "phase", "ms", "floor ms", "of floor", "bound by", "own shapes", "GFLOP/s", "own", "copy GB/s")
    table = Table(*columns, title=f"{rows[0]['dtype']}: T_floor / T_measured, medians of paired ratios")
    for r in rows:
        copied = "" if r["copy_gb_s"] is None else f"{r['copy_gb_s']:.1f}"
        products = r["phase"] != "refit"
        shapes = [f"{r['own_shapes']:.0%}", f"{r['matrix_gflops']:.0f}", f"{r['own_gflops']:.0f}"]
        cells = [f"{1e3 * r['seconds']:.2f}", f"{1e3 * r['floor_s']:.2f}", f"{r['ratio']:.0%}", r["bound"]]
        table.add_row(r["model"], r["phase"], *cells, *(shapes if products else [""] * 3), copied)
    Console(width=110).print(table)
    for r in rows:
        if r["phase"] == "refit":
            judged = f"at most {LIMIT:g}" if r["judged"] else "not judged: within the processor's cache"
            print(
                f"{r['model']}: a refit of {r['bytes'] / 1e6:.1f} MB takes {r['x_copy']:.2f} x a plain copy ({judged}),"
                f" to lay it out for its products {r['pack_x_copy']:.2f} x"
            )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="quickstart,3m,30m", help=f"of {','.join(WORKS)}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - WORKS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    from aligner.cluster.env import RankEnv
    from aligner.megatron.groups import init_distributed

    device = init_distributed(RankEnv(), "auto", 600.0)
    rows = [row for name in options.models.split(",") for row in measure(name, options.dtype, options.repeats, device)]
    show(rows)
    slow = too_slow(rows)
    print("\n".join(slow), end="\n" if slow else "")
    clock = "CPU seconds" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall seconds"
    write_json(options.json, {"rows": rows}, clock=clock, repeats=options.repeats)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
