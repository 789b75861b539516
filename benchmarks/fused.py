"""Bytes that operations of a training step move, by torch's kernels and by those of `aligner/ops/kernels/cuda`.

    python -m benchmarks.fused [--json FILE]

Counts on tensors without storage, by the rules of rehearsals (`aligner/rehearse/prices.py`). Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels import fused
from aligner.ops.kernels.experts import Pairs, combine, expand
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.rehearse.prices import kernel_of, moved_bytes

TOKENS = 8192  # of a micro-batch
RATE = 4.26e12  # bytes/s of copies, and
# of an update on one H200, without attention: weights that a token is multiplied with, and MFU of gpu.md
EIGHT_B_S = 6 * 7.5e9 * TOKENS / (0.467 * 989e12)
EXPERTS_S = 6 * 3.0e9 * TOKENS / (0.253 * 989e12)
FFN, LAYERS, VOCABULARY = 14336, 32, 128256  # Llama 3 8B


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    times: int  # in an update of a micro-batch
    update_s: float = EIGHT_B_S


def _swiglu(x: Tensor) -> Tensor:
    return kernels.swiglu(x)


def _logprobs(logits: Tensor, entropy: bool = False) -> Tensor:
    targets = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return token_logprobs(logits, targets, vocab_size=logits.shape[1], entropy=entropy)[0]


def _split(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.split_and_rotate(mixed, *_angles(mixed))


def _rotate(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.rotate(query, *_angles(query)), kernels.rotate(key, *_angles(key))


def _angles(x: Tensor) -> list[Tensor]:
    return [x.new_empty(TOKENS, 1, x.shape[-1] // 2) for _ in range(2)]


def _experts(x: Tensor, weights: Tensor) -> Tensor:
    order = torch.empty(weights.numel(), dtype=torch.int64, device=x.device)
    pairs = Pairs(order, order // weights.shape[1], order, weights.shape[1])
    return combine(expand(x, pairs), pairs, weights)


CASES = [
    Case("SwiGLU", _swiglu, ((TOKENS, 2 * FFN),), LAYERS),
    Case("rope and split", _split, ((TOKENS, 8, 6, 128),), LAYERS),
    Case("rope of queries and keys", _rotate, ((TOKENS, 32, 128), (TOKENS, 8, 128)), LAYERS),
    Case("logprobs of logits", _logprobs, ((TOKENS, VOCABULARY),), 1),
    Case("and entropy, as a metric", partial(_logprobs, entropy=True), ((TOKENS, VOCABULARY),), 1),
    Case("rows of experts (30B-A3B)", _experts, ((TOKENS, 2048), (TOKENS, 8)), 48, EXPERTS_S),
]


class Moved(TorchDispatchMode):
    """Bytes that operations read and write, counted like a rehearsal's, and how many move any."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if rule := kernel_of(func):
            tensors, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
            self.bytes += moved_bytes(rule, args, kwargs, tensors, made)
            self.kernels += 1
        return out


def moved(case: Case, by_fused: bool) -> Moved:
    """Count forward and backward of a case in bfloat16."""
    fused.DEVICES.discard("meta")
    if by_fused:
        fused.DEVICES.add("meta")
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in case.shapes]
    with Moved() as counts:
        outs = case.function(*inputs)
        outs = [outs] if isinstance(outs, Tensor) else [x for x in outs if x is not None]
        torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])
    fused.DEVICES.discard("meta")
    return counts


def main(arguments: list[str]) -> int:
    from benchmarks.common import write_json

    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(
        f"bfloat16, {TOKENS} tokens; copies at {RATE / 1e12} TB/s. {EIGHT_B_S * 1e3:.0f} ms of an update of Llama 3 8B,"
    )
    print(f"{EXPERTS_S * 1e3:.0f} of 30B-A3B")
    print(f"{'':<28}{'kernels':>9}{'MB':>16}{'ms of the update':>20}{'saved':>8}")
    rows = []
    for case in CASES:
        before, after = moved(case, False), moved(case, True)
        ms = [x.bytes * case.times / RATE * 1e3 for x in (before, after)]
        share = (ms[0] - ms[1]) / 1e3 / case.update_s
        size = f"{before.bytes / 1e6:.0f} -> {after.bytes / 1e6:.0f}"
        time = f"{ms[0]:.1f} -> {ms[1]:.1f}"
        print(f"{case.name:<28}{f'{before.kernels} -> {after.kernels}':>9}{size:>16}{time:>20}{share:>8.1%}")
        rows.append({"name": case.name, "bytes": [before.bytes, after.bytes], "ms": ms, "share": share})
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
