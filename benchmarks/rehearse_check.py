"""Updates and logprobs of `gpu.py`, estimated by a rehearsal, beside what one H200 measured.

    python -m benchmarks.rehearse_check [--shapes 8b_width,moe_width,0.6b] [--now] [--json FILE]

The H200 ran torch's operations where the trainer now has kernels of its own (`ops/kernels/fused.py`) and attention in
one call. So both are off here, but for `--now`, which estimates the present code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import write_json

# gpu.md, 2026-11-26: rates of passes that read every token as shares of the peak, and seconds of a grpo step's passes
MEASURED = {
    "8b_width": {"train.mfu": 0.467, "logprobs.mfu": 0.52, "grpo.update_s": 5.10, "grpo.logprobs_s": 1.54},
    "moe_width": {"train.mfu": 0.253, "logprobs.mfu": 0.31},
    "0.6b": {"train.mfu": 0.233, "logprobs.mfu": 0.25, "grpo.update_s": 2.71, "grpo.logprobs_s": 0.87},
}
PASSES = {"train": ("update", 6), "logprobs": ("logprobs", 2)}  # figure: phase, operations of a token by N


def rehearse(name: str, now: bool) -> dict[str, Any]:
    """Run the passes on a rehearsed H200. Patches stay in this process."""
    from aligner.plan.devices import DEVICES
    from aligner.rehearse import cuda, program, shortened
    from aligner.rehearse.collectives import Collectives, join
    from aligner.rehearse.device import RehearsedDevice
    from aligner.rehearse.kernels import CUDA
    from aligner.rehearse.record import RehearsalRecord

    sheet, record = DEVICES["h200"], RehearsalRecord()
    device = RehearsedDevice(record, sheet, gpus_per_node=8)
    cuda.install(device, sheet.name)
    Collectives(device, record)
    shortened.install(record)
    program.route_evenly(device)
    from aligner.ops.kernels import fused
    from aligner.plan.shapes import active_parameters
    from benchmarks.gpu import SHAPES, Machine, Size
    from benchmarks.gpu_bench import Bench

    join(0, 1)
    torch.cuda.set_device(CUDA)
    torch.Generator = lambda *device: SimpleNamespace(manual_seed=lambda seed: None)  # numbers have no values
    cfg, size = SHAPES[name], Size()
    if not now:
        fused.DEVICES.clear()
        cfg = replace(cfg, varlen_attention=False)
    shape = size.prompts * size.group, size.response_tokens
    responses = SimpleNamespace(tokens=torch.ones(shape, dtype=torch.int64), logprobs=torch.zeros(shape))
    with device:
        bench = Bench(cfg, size, size.micro_tokens[0], Machine(CUDA, sheet.name, sheet, 0.0, 0.0))
        bench.update(bench.rows(responses))  # makes the optimizer's state
        for kind in ("every", "grpo"):
            rows = bench.rows(responses, every=kind == "every")
            masks = [] if kind == "every" else [rows.loss_mask]
            device.enter(f"{kind} logprobs")
            bench.policy.logprobs(rows, *masks)
            device.enter(f"{kind} update")
            bench.update(rows)
    phases, tokens = record.data()["phases"], shape[0] * size.row
    figures = {f"grpo.{phase}_s": phases[f"grpo {phase}"]["seconds"] for phase, _ in PASSES.values()}
    for figure, (phase, operations) in PASSES.items():
        made = operations * active_parameters(cfg) * tokens
        figures[f"{figure}.mfu"] = made / phases[f"every {phase}"]["seconds"] / sheet.flops
    return {"figures": figures, "phases": {key: phase for key, phase in phases.items() if " " in key}}


def show(name: str, results: dict[str, Any]) -> None:
    for key, measured in MEASURED[name].items():
        estimated = results["figures"][key]
        print(f"{name:<10}{key:<16}{measured:8.3f} measured{estimated:8.3f} estimated{estimated / measured - 1:+8.1%}")
    for key, phase in results["phases"].items():
        parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in phase["device_s"].items())
        print(f"{name:<10}{key:<16}{phase['seconds']:8.3f} s: {parts}, launches {phase['launch_s']:.3f}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearse_check", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(MEASURED))
    parser.add_argument("--now", action="store_true", help="with the kernels that the trainer has now")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(rehearse(options.one, options.now)))
        return
    shapes = {}
    for name in options.shapes.split(","):
        command = [sys.executable, "-m", "benchmarks.rehearse_check", "--one", name, *["--now"] * options.now]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        shapes[name] = json.loads(out.splitlines()[-1])
        show(name, shapes[name])
    write_json(options.json, {"shapes": shapes})


if __name__ == "__main__":
    main(sys.argv[1:])
