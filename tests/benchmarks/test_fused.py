"""Bytes that operations of a training step move."""

import pytest

from benchmarks import fused


@pytest.mark.parametrize("case", fused.CASES, ids=lambda case: case.name)
def test_a_kernel_of_its_own_moves_far_fewer_bytes(case):
    before, after = fused.moved(case, False), fused.moved(case, True)
    assert after.kernels < before.kernels and after.bytes < 0.6 * before.bytes
    assert fused.moved(case, False).bytes == before.bytes  # torch's again


def test_swiglus_bytes_are_those_of_its_docstring():
    case = next(case for case in fused.CASES if case.name == "SwiGLU")
    number = 2 * case.shapes[0][0] * case.shapes[0][1] // 2
    assert [fused.moved(case, by_fused).bytes for by_fused in (False, True)] == [16 * number, 8 * number]
