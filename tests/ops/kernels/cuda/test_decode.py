"""The kernel of decode steps in Triton's interpreter, and as it is compiled for GPUs that are not here."""

import pytest
import torch

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda.decode import PROGRAMS, STAGES, WARPS, _attend, parts_for  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled, lines_of_cases  # noqa: E402

BASE = {
    "TOKENS": 1,
    "SHARE": 4,
    "WIDTH": 128,
    "VALUE_WIDTH": 128,
    "WINDOW": 0,
    "CAPPED": False,
    "SINKS": False,
    "EXACT": False,
    "PAGED": False,
}
BASE |= {"PARTS": 1, "HEADS": 16, "WIDE": 128, "VALUE_WIDE": 128, "STEP": 64}
LARGE = {"SHARE": 17, "HEADS": 32, "WIDE": 256, "WIDTH": 256, "VALUE_WIDE": 256, "VALUE_WIDTH": 256}
WILD = {"TOKENS": 5, "PARTS": 4, "WINDOW": 300, "CAPPED": True, "SINKS": True, "PAGED": True}


def test_it_equals_a_loop_in_float64():
    lines = lines_of_cases("decode_cases", "0", "48")
    assert len(lines) == 48, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("options", [{}, WILD, LARGE | {"EXACT": True, "STEP": 32}], ids=["plain", "wild", "large"])
def test_it_compiles_for_gpus(options, capability):
    constants, element = BASE | options, "fp32" if options.get("EXACT") else "bf16"
    kinds = dict.fromkeys(["query", "key", "value", "sinks", "out"], f"*{element}")
    kinds |= {"positions": "*i64", "table": "*i64", "tops": "*fp32", "sums": "*fp32", "scale": "fp32", "cap": "fp32"}
    kinds |= {"out": "*fp32"} if constants["PARTS"] > 1 else {}
    compiled(_attend, kinds, constants, capability, num_stages=STAGES, num_warps=WARPS)


@pytest.mark.parametrize(("programs", "length"), [(1, 100), (8, 8192), (64, 8192), (2048, 1 << 20)])
def test_parts_fill_the_gpu_and_are_worth_it(programs, length):
    parts = parts_for(programs, length)
    assert parts == 1 or (length // parts >= 256 and programs * parts < 2 * PROGRAMS)
    assert parts_for(programs, 1 << 20) * programs >= PROGRAMS and parts & (parts - 1) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernel_runs_on_this_gpu():
    from aligner.ops.kernels.cuda.decode import attend
    from aligner.ops.kernels.scored_attention import ScoreRule

    q, kv = torch.randn(3, 8, 64, device="cuda"), torch.randn(2, 3, 2, 40, 64, device="cuda")
    table = torch.arange(3, device="cuda")[:, None]
    out = attend(q, kv[0], kv[1], torch.tensor([0, 39, 7], device="cuda"), table, 40, ScoreRule())
    assert torch.allclose(out[0], kv[1, 0, :, 0].repeat_interleave(4, 0), atol=1e-5)
