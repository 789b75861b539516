"""Gated activations in Triton's interpreter, and as they are compiled for GPUs that are not here."""

import pytest

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda import gates  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled, lines_of_cases  # noqa: E402


def test_they_equal_their_formulas_and_swiglu_rounds_as_torchs_operations():
    lines = lines_of_cases("gates_cases")
    assert len(lines) == 37, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_they_compile_for_gpus(kind, element, capability):
    constants = {"KIND": kind, "ALPHA": 1.702, "LIMIT": 7.0, "BLOCK": gates.BLOCK}
    kinds = dict.fromkeys(("grad", "x", "out"), f"*{element}")
    for kernel in (gates._forward, gates._backward):
        numbers = compiled(kernel, kinds, constants, capability, num_warps=gates.WARPS)
        assert (
            not numbers["spilled"] and numbers["wide"] and numbers["registers"] <= 64
        )  # so that a multiprocessor has 8 programs at least
