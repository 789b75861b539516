"""Rotary embedding in Triton's interpreter, and as it is compiled for GPUs that are not here."""

import pytest

from tests.needs import package

package("triton")

from aligner.ops.kernels.cuda.rope import WARPS, _rotate  # noqa: E402
from tests.ops.kernels.cuda.triton_compiled import CAPABILITIES, compiled, lines_of_cases  # noqa: E402

PLAIN = {"SHARE": 4, "EXTRA": 2, "HALF": 64, "WIDTH": 128, "HEADS": 16, "PAIRS": 64, "REST": 0}
PARTIAL = {"SHARE": 5, "EXTRA": 2, "HALF": 40, "WIDTH": 256, "HEADS": 16, "PAIRS": 64, "REST": 256}
ALONE = {"SHARE": 1, "EXTRA": 0, "HALF": 32, "WIDTH": 64, "HEADS": 32, "PAIRS": 32, "REST": 0}


def test_it_equals_torchs_operations():
    lines = lines_of_cases("rope_cases")
    assert len(lines) == 96, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [PLAIN, PARTIAL, ALONE], ids=["plain", "partial", "alone"])
def test_it_compiles_for_gpus(shape, back, capability):
    kinds = dict.fromkeys(("mixed", "query", "key", "value", "cos", "sin"), "*bf16")
    constants = shape | {"NEIGHBOURS": shape is ALONE, "BACK": back}
    numbers = compiled(_rotate, kinds, constants, capability, num_warps=WARPS)
    assert not numbers["spilled"] and numbers["registers"] <= 64
    assert numbers["wide"] or shape is ALONE  # neighbours are read one by one
