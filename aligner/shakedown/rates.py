"""Print the rates of each card as JSON: matrix products, copies on the card and from the host."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from aligner.plan.devices import sheet_of

PACKAGES = ("torch", "megatron-core", "transformers", "aligner")
# shares of the data sheet below which a card is not fit
LEAST = {"bfloat16 products, operations/s": 0.55, "copies, bytes/s": 0.60}
REPEATS = 10


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one of several calls, after one that is not timed."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    action()
    wait(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        action()
    wait(device)
    return (time.perf_counter() - start) / REPEATS


def card(device: torch.device) -> dict[str, Any]:
    """Return name and memory, and for each rate: measured, the data sheet's (0 if unknown), the least share of it."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    sheet = sheet_of(name)
    n, size = (8192, 1 << 31) if cuda else (256, 1 << 24)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    measured = {
        "bfloat16 products, operations/s": 2 * n**3 / seconds(lambda: a @ a, device),
        "copies, bytes/s": 2 * size / seconds(lambda: target.copy_(source), device),
        "from the host, bytes/s": size / seconds(lambda: target.copy_(host, non_blocking=True), device),
    }
    known = {"bfloat16 products, operations/s": sheet.flops, "copies, bytes/s": sheet.bandwidth} if sheet else {}
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    rates = {key: (value, known.get(key, 0.0), LEAST.get(key, 0.0)) for key, value in measured.items()}
    return {"name": name, "memory_bytes": memory, "rates": rates}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aligner.shakedown.rates", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="of the CPU, with small tensors")
    args = parser.parse_args(argv)
    kinds = ["cpu"] if args.cpu else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda} | {n: version(n) for n in PACKAGES}
    print(json.dumps({"versions": versions, "cards": [card(torch.device(kind)) for kind in kinds]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
