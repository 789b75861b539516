"""`ops/kernels/cuda/linear.py` against torch's operations in float64, by flash-linear-attention's own kernels: on a GPU
or in Triton's interpreter. `launchers/te_python.sh` gets the package.

python -m tests.ops.kernels.cuda.linear_cases     # prints the greatest differences; exit 1 for a large one
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tests.megatron.te_stand_in import FOLDER
from tests.ops.kernels.cuda.interpreted import CLOSE, DEVICE, differ

if DEVICE == "cpu":
    sys.path.append(str(FOLDER))

from aligner.ops.kernels import fused
from aligner.ops.kernels.delta_rule import causal_mix, delta_rule, delta_steps
from aligner.ops.kernels.mamba2 import scan

LENGTHS = [5, 1, 66]  # of packed rows: the last has two chunks
# the interpreter multiplies bfloat16's bits as integers, and a GPU float32 by TensorFloat-32
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float16, torch.bfloat16)
CLOSE |= {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # chunks pass on numbers of the dtype


def interpret() -> None:
    """Let the interpreter run the kernels: it tunes nothing, and its loops count in numbers that are no tensors."""
    from triton.runtime.autotuner import Autotuner

    class Count(int):
        def to(self, dtype: object) -> Count:
            return self

    Autotuner._bench = lambda self, *args, config, **options: [0.0] * 3
    fused.HALVES.add(torch.float32)
    fused._linear()
    for name, module in sys.modules.items():
        if name.startswith("fla."):
            module.range = lambda *bounds: map(Count, builtins.range(*bounds))


def packed(function: Callable) -> Callable:
    """Return a function of packed rows, which torch computes one after the other."""

    def of_rows(*inputs: Tensor) -> Tensor:
        if inputs[0].dtype != torch.float64:
            ends = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).int()
            outs = function(*inputs, ends=ends)
            return outs if isinstance(outs, Tensor) else outs[0]
        rows = zip(*(x.split(LENGTHS, 1) if x.dim() > 2 else [x] * len(LENGTHS) for x in inputs), strict=True)
        outs = [function(*row) for row in rows]
        return torch.cat([out if isinstance(out, Tensor) else out[0] for out in outs], 1)

    return of_rows


def mixed(x: Tensor, weight: Tensor, bias: Tensor, ends: Tensor | None = None) -> Tensor:
    return causal_mix(x, weight, bias=bias, ends=ends)


def steps(query, key, value, decay, beta, state) -> bool:
    """Without gradients, as decoding has none."""
    with torch.no_grad():
        wanted, last = delta_rule(*(x.double() for x in (query, key, value, decay, beta, state)))
        numbers = query, key, value, decay, beta
        tentative = delta_steps(*numbers, state, changes=False)
        outs = [delta_steps(*(x[:, t : t + 1] for x in numbers), state) for t in range(len(query[0]))]
    pairs = (torch.cat(outs, 1), wanted), (tentative, wanted), (state, last)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    print(f"{error:.1e} {query.dtype} steps")
    return not error <= CLOSE[query.dtype]


def wrong() -> int:
    bad, g = 0, torch.Generator().manual_seed(0)
    for dtype in DTYPES:

        def random(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*sizes, generator=g).to(DEVICE, dtype)

        def inputs(rows: int, length: int, keys: int, values: int, dk: int, dv: int) -> list[Tensor]:
            """Queries, keys, values; decays, and betas or steps, in float32."""
            numbers = torch.rand(2, rows, length, values, generator=g).to(DEVICE)
            qk = [random(rows, length, keys, dk) for _ in "qk"]
            return [*qk, random(rows, length, values, dv), -2 * numbers[0], numbers[1]]

        rows, state = inputs(1, sum(LENGTHS), 1, 2, 16, 24), random(1, 2, 16, 24, dtype=torch.float32)
        heads = [-torch.rand(2, generator=g).to(DEVICE), random(2, dtype=torch.float32)]
        scanned = [*(x / 4 for x in rows[:3]), rows[4], *heads]
        x, weights = random(1, sum(LENGTHS), 12), (random(12, 4), random(12))
        bad += steps(*(x[:, :3] for x in rows), state.clone())
        if dtype == DTYPES[0]:
            bad += differ("delta rule of packed rows", packed(delta_rule), packed(delta_rule), *rows)
            bad += differ("scan of packed rows", packed(scan), packed(scan), *scanned)
            bad += differ("mixing of packed rows", packed(mixed), packed(mixed), x, *weights)
        else:
            short = [x[:, :18].view(2, 9, *x.shape[2:]) if x.dim() > 2 else x for x in (*rows, *scanned, x)]
            states = state.expand(2, -1, -1, -1)
            bad += differ("delta rule", delta_rule, delta_rule, *short[:5], states)
            bad += differ("scan", scan, scan, *short[5:-1], states)
            bad += differ("mixing", causal_mix, causal_mix, short[-1], weights[0])
    return bad


if __name__ == "__main__":
    if DEVICE == "cpu":
        interpret()
    if fused._linear() is None:
        sys.exit(1)
    sys.exit(wrong() > 0)
