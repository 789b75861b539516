"""Sums over experts in Triton's interpreter, and as they are compiled for GPUs that are not here."""

import pytest

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda import pair_sums  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled, lines_of_cases  # noqa: E402


def test_they_equal_torchs_operations():
    lines = lines_of_cases("pair_sums_cases")
    assert len(lines) == 60, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_they_compile_for_gpus(element, weighted, capability):
    kinds = dict.fromkeys(("grad", "x", "weights", "out", "d_x", "d_weights"), f"*{element}") | {"index": "*i64"}
    constants = {"TOP_K": 8, "BLOCK": pair_sums.BLOCK}
    for kernel, own in ((pair_sums._sum, {"WEIGHTED": weighted}), (pair_sums._gradient, {})):
        numbers = compiled(kernel, kinds, constants | own, capability, num_warps=pair_sums.WARPS)
        assert not numbers["spilled"] and numbers["wide"] and numbers["registers"] <= 64
