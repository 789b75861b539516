"""oneDNN computes wherever torch has it; whether it is worth while is another question (`worth_packing`)."""

import pytest
import torch

from aligner.ops.kernels import packed_products
from aligner.ops.kernels.bfloat16_products import widened
from aligner.ops.kernels.packed_products import (
    SMALLEST,
    SMALLEST_BESIDE_MKL,
    pack,
    pack_over,
    packed_linear,
    packed_linear_add,
    place_of,
    worth_packing,
)
from aligner.ops.kernels.products import add_linear, linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
N, K = 190, 212  # no multiple of any block
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(widened(torch.device("cpu"), torch.bfloat16), reason="no instructions for bfloat16"),
    ),
]


def factors(dtype, rows=37):
    g = torch.Generator().manual_seed(0)
    shapes = (rows, K), (N, K), (N,), (rows, N)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_sums_are_rounded_once(dtype):
    x, weight, bias, base = factors(dtype)
    with torch.inference_mode():
        packed, exact = pack(weight), x.double() @ weight.double().t()
        size = x.double().abs() @ weight.double().abs().t() + bias.abs() + base.abs()
        known = [(packed_linear(x, packed, bias), exact + bias), (packed_linear_add(base, x, packed), exact + base)]
        for w in (weight, packed):
            known += [(linear(x, w), exact), (add_linear(base.clone(), x, w), exact + base)]
        for actual, wanted in known:
            assert actual.dtype == dtype and actual.shape == wanted.shape
            rounded = (actual.double() - wanted).abs() - torch.finfo(dtype).eps / 2 * wanted.abs()
            assert (rounded <= K / 2 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_comes_back(dtype):
    weight = factors(dtype)[1]
    with torch.inference_mode():
        assert torch.equal(pack(weight).to_dense(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_matrix_takes_the_place_where_its_layout_is_the_same(dtype):
    weight, other = factors(dtype)[1], factors(dtype)[1].flip(0)
    with torch.inference_mode():
        packed, plain = pack(weight), weight.to_mkldnn()
        position = place_of(packed)
        assert pack_over(packed, other) is packed and place_of(packed) == position
        actual = pack_over(plain, other)
        assert actual is not plain and torch.equal(plain.to_dense(), weight)
        for matrix in (packed, actual):
            assert torch.equal(matrix.to_dense(), other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [K, 2048])
def test_a_row_alone_is_as_among_others(dtype, k):
    g = torch.Generator().manual_seed(0)
    x, weight, base = (torch.randn(shape, generator=g).to(dtype) for shape in ((130, k), (N, k), (130, N)))
    if not worth_packing(weight):
        pytest.skip("elsewhere nothing is packed")
    with torch.inference_mode():
        packed = pack(weight)
        whole, sums = packed_linear(x, packed), packed_linear_add(base, x, packed)
        for rows in (slice(1), slice(7, 8), slice(2), slice(3, 20), slice(64, 130)):
            assert torch.equal(packed_linear(x[rows], packed), whole[rows])
            assert torch.equal(packed_linear_add(base[rows], x[rows], packed), sums[rows])


def test_what_is_worth_packing(monkeypatch):
    large, largest = torch.empty(SMALLEST // 64, 64), torch.empty(SMALLEST_BESIDE_MKL // 64, 64)
    for has, leads in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(packed_products, "has_avx512", lambda has=has: has)
        monkeypatch.setattr(packed_products, "onednn_leads", lambda leads=leads: leads)
        assert worth_packing(large) is leads and worth_packing(largest) is has
        assert worth_packing(largest[1:]) is leads
        assert (
            not worth_packing(large[1:]) and not worth_packing(large.double()) and not worth_packing(large.to("meta"))
        )
    for slow in (True, False):
        monkeypatch.setattr(packed_products, "widened", lambda *_, slow=slow: slow)
        assert worth_packing(large.bfloat16()) is not slow
