"""What a rank does for the tests of the floors: count the operations and bytes of each phase."""

from __future__ import annotations

import math
from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from aligner.ops import wide_products
from benchmarks.floor_phases import PHASES, WORKS, Subject
from benchmarks.floors import measure

aten = torch.ops.aten
MATRIX = ("mm", "addmm", "addmm_")  # linear layers; the rest are products of attention


def addmm_in_place(self_shape, a_shape, b_shape, out_shape=None, **kwargs) -> int:
    return mm_flop(a_shape, b_shape)


def attention_forward(query, key, *unused, out_shape=None, **options) -> int:
    """Scores and their sum over values, in full."""
    return 4 * math.prod(query) * key[-2]


def attention_backward(grad, query, key, *unused, out_shape=None, **options) -> int:
    """Two products for each of the forward pass; what a kernel computes again is not counted."""
    return 2 * attention_forward(query, key)


MORE = {
    aten.addmm_: addmm_in_place,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def subject(name: str) -> Subject:
    return Subject(WORKS[name], torch.float32, torch.device("cpu"))


def operations(name: str) -> dict[str, dict[str, float]]:
    """phase -> {"linear", "attention"}: what torch's own counter sees. Decode is a generation less its first token."""
    timed, found = subject(name), {}
    for phase in PHASES:
        with FlopCounterMode(display=False, custom_mapping=MORE) as counter:
            timed.action(phase)()
        seen: Counter[str] = Counter()
        for op, count in counter.get_flop_counts().get("Global", {}).items():
            seen["linear" if str(op).removeprefix("aten.") in MATRIX else "attention"] += count
        found[phase] = dict(seen)
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


REPLACED = (  # by `ops/wide_products.py`
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
    with patch.object(wide_products, "_slow_here", lambda: True):
        timed = Subject(WORKS[name], torch.bfloat16, torch.device("cpu"))
        for phase in PHASES:
            with SlowKernels() as heard:
                timed.action(phase)()
            found[phase] = sorted(heard.seen)
    timed.bench.close()
    return found


def rows(name: str, dtype: str) -> list[dict]:
    return measure(name, dtype, 2, torch.device("cpu"))
