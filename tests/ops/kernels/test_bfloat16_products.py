import subprocess
import sys

import pytest
import torch

from aligner.ops.kernels.bfloat16_products import _product, _slow_here, _sum, _sum_into

A, B, BASE = torch.randn(3, 5, 64), torch.randn(3, 64, 7), torch.randn(3, 5, 7)
CASES = {
    "mm": (_product(torch.mm), torch.mm, (A[0], B[0])),
    "bmm": (_product(torch.bmm), torch.bmm, (A, B)),
    "addmm": (_sum(torch.addmm), torch.addmm, (BASE[0], A[0], B[0])),
    "addmm of a row": (_sum(torch.addmm), torch.addmm, (BASE[0, 0], A[0], B[0])),
    "baddbmm": (_sum(torch.baddbmm), torch.baddbmm, (BASE, A, B)),
    "addmm_": (_sum_into(torch.addmm), torch.addmm, (BASE[0], A[0], B[0])),
    "baddbmm_": (_sum_into(torch.baddbmm), torch.baddbmm, (BASE, A, B)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bfloat16_product_is_the_exact_one_rounded_once(name):
    kernel, op, inputs = CASES[name]
    inputs = [x.bfloat16() for x in inputs]
    exact = op(*(x.double() for x in inputs))
    out = kernel(*(x.clone() for x in inputs))
    assert out.dtype == torch.bfloat16
    # float32's rounding can only move what lies between two bfloat16 numbers: almost all are the nearest one
    assert (out == exact.bfloat16()).float().mean() > 0.9
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_types_are_torchs_own(name, dtype):
    kernel, op, inputs = CASES[name]
    inputs = [x.mul(10).to(dtype) for x in inputs]
    out = kernel(*(x.clone() for x in inputs))
    assert out.dtype == dtype and torch.equal(out, op(*inputs))


def test_factors_are_kept_and_sums_are_in_place():
    base, a, b = (x.bfloat16() for x in (BASE[0], A[0], B[0]))
    nan = torch.full_like(base, torch.nan)
    assert torch.equal(_sum(torch.addmm)(nan, a, b, beta=0, alpha=2), 2 * _product(torch.mm)(a, b))
    into = base.clone()
    assert _sum_into(torch.addmm)(into, a, b, alpha=-1) is into
    torch.testing.assert_close(into, base - _product(torch.mm)(a, b), rtol=2**-6, atol=0.1)


def test_a_torch_without_onednn_has_no_fast_products(monkeypatch):
    """Such as macOS': it has no operation to ask, either."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _slow_here.__wrapped__()


INSTALLED = """
import torch
from aligner.ops.kernels.bfloat16_products import widen_bfloat16_products

weight = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
library = widen_bfloat16_products()
fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
assert (library is None) == fast
assert widen_bfloat16_products() is library
y = torch.nn.functional.linear(x, weight)
assert torch.equal(y, (x.float() @ weight.float().t()).bfloat16()) or library is None
y.sum().backward()
assert torch.equal(weight.grad, x.float().sum((0, 1)).bfloat16().expand(8, 16)), weight.grad
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
"""


@pytest.mark.slow
def test_it_is_installed_once_for_the_process_with_gradients():
    ended = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
