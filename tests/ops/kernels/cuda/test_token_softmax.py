"""Softmax of logits in Triton's interpreter, and as it is compiled for GPUs that are not here."""

import subprocess
import sys

import pytest

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda import token_softmax  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled  # noqa: E402


def test_it_equals_torchs_operations_on_one_rank_and_on_two():
    """In a process of its own: Triton decides whether it interprets when it is imported."""
    command = [sys.executable, "-m", "tests.ops.kernels.cuda.token_softmax_cases"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("torch.") == 70, done.stdout + done.stderr


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
