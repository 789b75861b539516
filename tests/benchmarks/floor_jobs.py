"""What a rank does for the tests of the floors: count the operations and bytes of each phase."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.ops.kernels import bfloat16_products
from benchmarks.floor_phases import PHASES, WORKS, Subject
from benchmarks.floors import measure
from tests.operations import counted

aten = torch.ops.aten


def subject(name: str) -> Subject:
    return Subject(WORKS[name], torch.float32, torch.device("cpu"))


def operations(name: str) -> dict[str, dict[str, float]]:
    """phase -> {"linear", "attention"}: what torch's own counter sees. Decode is a generation less its first token."""
    timed, found = subject(name), {}
    for phase in PHASES:
        found[phase] = counted(timed.action(phase))
    for part, count in found["prefill"].items():
        found["decode"][part] -= count
    timed.bench.close()
    return found


def stored(name: str) -> dict[str, float]:
    """Bytes of an engine's weights, of its cache for one position of one row, and of what a refit writes."""
    timed = subject(name)
    told = timed.bench.refit()
    timed.bench.generate(WORKS[name].rows, 1)
    cache = timed.bench.engine.cache.kv
    found = {
        "weights": float(sum(view.nbytes for view in timed.bench.engine.model.views.values())),
        "position": cache.nbytes / cache.shape[2] / cache.shape[4],
        "refit": told["refit/bytes"],
    }
    timed.bench.close()
    return found


REPLACED = (  # by `ops/kernels/bfloat16_products.py`
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.baddbmm.default,
    aten.baddbmm_.default,
)
SLOW = (
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.addmm_,
    aten.baddbmm,
    aten.baddbmm_,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


class SlowKernels(TorchDispatchMode):
    """Calls of torch's own products in bfloat16."""

    def __enter__(self):
        self.seen: set[str] = set()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in SLOW and func not in REPLACED and args[1].dtype is torch.bfloat16:
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def slow_products(name: str) -> dict[str, list[str]]:
    """phase -> torch's own products in bfloat16, if the processor had no instructions for it."""
    found = {}
    with patch.object(bfloat16_products, "_slow_here", lambda: True):
        timed = Subject(WORKS[name], torch.bfloat16, torch.device("cpu"))
        for phase in PHASES:
            with SlowKernels() as heard:
                timed.action(phase)()
            found[phase] = sorted(heard.seen)
    timed.bench.close()
    return found


def rows(name: str, dtype: str) -> list[dict]:
    return measure(name, dtype, 2, torch.device("cpu"))
