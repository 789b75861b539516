import subprocess
import sys

import pytest
import torch

from aligner.ops.kernels import onednn_products
from aligner.ops.kernels.onednn_products import SMALLEST, _addmm, _addmm_, _mm, onednn_product
from aligner.ops.kernels.products import product_into

M, K, N = 131, 190, 210  # more than SMALLEST multiplications
WAYS = {
    "row by row": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "part of a matrix": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "part of a transposed one": lambda x: torch.cat([x, x]).t().contiguous().t()[: x.shape[0]],
    "one row again and again": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x[:1, :1].expand(x.shape),
}


@pytest.fixture
def lagging(monkeypatch):
    monkeypatch.setattr(onednn_products, "onednn_leads", lambda: True)


def factors():
    g = torch.Generator().manual_seed(0)
    return torch.randn(M, K, generator=g), torch.randn(K, N, generator=g)


@pytest.mark.parametrize("right", WAYS)
@pytest.mark.parametrize("left", WAYS)
def test_a_product_in_float32_however_its_factors_lie(lagging, left, right):
    a, b = factors()
    a, b = WAYS[left](a), WAYS[right](b)
    exact, out = a.double() @ b.double(), onednn_product(a, b)
    assert out.dtype == torch.float32 and out.is_contiguous()
    summed = a.double().abs() @ b.double().abs()
    assert ((out - exact).abs() <= K / 2 * torch.finfo(torch.float32).eps * summed).all()  # holds for sums in any order


def test_what_is_small_or_of_another_type_stays_with_torch(lagging, monkeypatch):
    a, b = factors()
    assert onednn_product(a[: SMALLEST // (K * N)], b) is None
    assert onednn_product(a.double(), b.double()) is onednn_product(a.bfloat16(), b.bfloat16()) is None
    assert onednn_product(a.to("meta"), b.to("meta")) is None
    for dtype in (torch.float64, torch.int64):
        assert torch.equal(_mm(a[:5].to(dtype), b.to(dtype)), torch.mm(a[:5].to(dtype), b.to(dtype)))
    monkeypatch.setattr(onednn_products, "onednn_leads", lambda: False)
    assert onednn_product(a, b) is None and torch.equal(_mm(a, b), a @ b)


@pytest.mark.parametrize("rows", [slice(None), slice(3)], ids=["large", "small"])
def test_sums_of_products_equal_torch(lagging, rows):
    a, b = factors()
    a = a[rows]
    base = torch.randn(len(a), N)
    near = {"rtol": 1e-5, "atol": 1e-4}
    for added in (base, base[0]):
        torch.testing.assert_close(_addmm(added, a, b), added + a @ b, **near)
        torch.testing.assert_close(product_into(torch.empty_like(base), a, b, added), added + a @ b, **near)
    torch.testing.assert_close(_addmm(base, a, b, beta=0.5, alpha=2), 0.5 * base + 2 * (a @ b), **near)
    torch.testing.assert_close(product_into(torch.empty_like(base), a, b), a @ b, **near)
    for factors_ in ({}, {"beta": 0.5, "alpha": 2.0}):
        into = base.clone()
        assert _addmm_(into, a, b, **factors_) is into
        torch.testing.assert_close(into, torch.addmm(base, a, b, **factors_), **near)


INSTALLED = """
import torch
from aligner.ops.kernels import onednn_products
from aligner.ops.kernels.onednn_products import use_onednn_products

onednn_products.onednn_leads = lambda: True
asked = []
linear = onednn_products._linear
onednn_products._linear = lambda *arguments: asked.append(1) or linear(*arguments)
torch.manual_seed(0)
x, weight, bias = torch.randn(2, 131, 190), torch.randn(210, 190), torch.randn(210)
grads = []
for installed in (False, True):
    if installed:
        assert use_onednn_products() is use_onednn_products() is not None
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = torch.nn.functional.linear(*leaves) @ leaves[1]
    (y * torch.arange(190)).sum().backward()
    grads.append([y.detach(), *(t.grad for t in leaves)])
    assert len(asked) == (6 if installed else 0), len(asked)
for ours, torchs in zip(*grads):
    assert (ours - torchs).abs().max() <= 1e-4 * torchs.abs().max()
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
"""


@pytest.mark.slow
def test_it_is_installed_once_for_the_process_with_gradients():
    subprocess.run([sys.executable, "-W", "error", "-c", INSTALLED], check=True)
