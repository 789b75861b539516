"""Softmax of logits in Triton's interpreter, and as it is compiled for GPUs that are not here."""

import pytest

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda import token_softmax  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled, lines_of_cases  # noqa: E402


def test_it_equals_torchs_operations_on_one_rank_and_on_two():
    lines = lines_of_cases("token_softmax_cases")
    assert "".join(lines).count("torch.") == 70, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_it_compiles_for_gpus(element, entropy, capability):
    constants = {"ENTROPY": entropy, "BLOCK": token_softmax.BLOCK}
    kinds = {"logits": f"*{element}", "targets": "*i64", "numbers": "*fp32", "rate": "fp32"}
    for kernel, out in ((token_softmax._sums, "*fp32"), (token_softmax._gradient, f"*{element}")):
        odd = ("rows", "offset", "columns")
        numbers = compiled(kernel, kinds | {"out": out}, constants, capability, odd, num_warps=token_softmax.WARPS)
        assert not numbers["spilled"] and numbers["wide"] and numbers["registers"] <= 64
