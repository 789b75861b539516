"""A row's result has the same bits whatever rows are beside it, where ordinary functions choose by their number."""

import pytest
import torch
from torch import Tensor

from aligner.ops.kernels import invariant
from aligner.ops.kernels.experts import combine, expand, grouped_linear, route, sort_pairs

WIDTH, EXPERTS, TOP_K = 896, 4, 2


def experts_of(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    routing = route(x, router, TOP_K, True, invariant=True)
    pairs, sizes = sort_pairs(routing.experts, EXPERTS)
    mixed = invariant.by_rows(torch.nn.functional.silu, grouped_linear(expand(x, pairs), gate_up, sizes, True))
    return combine(grouped_linear(mixed, down, sizes, True), pairs, routing.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beside_it_change_no_bit_of_a_row(dtype):
    torch.manual_seed(1)
    x, matrix = torch.randn(100, WIDTH, dtype=dtype), torch.randn(64, WIDTH, dtype=dtype)
    router, gate_up = torch.randn(EXPERTS, WIDTH, dtype=dtype), torch.randn(EXPERTS, 80, WIDTH, dtype=dtype)
    down = torch.randn(EXPERTS, WIDTH, 80, dtype=dtype)
    functions = {
        "product": lambda rows: invariant.linear(rows, matrix),
        "experts": lambda rows: experts_of(rows, router, gate_up, down),
        "weights": lambda rows: route(rows, router, TOP_K, False, invariant=True).weights,
    }
    for name, function in functions.items():
        whole = function(x)
        for first, last in [(0, 1), (3, 4), (5, 12), (50, 63), (0, 16), (30, 47), (10, 90)]:
            assert torch.equal(function(x[first:last]), whole[first:last]), (name, first, last)


def test_experts_without_rows_have_gradients_of_zero():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3, 6, 8, requires_grad=True)
    out = grouped_linear(x, weight, [2, 0, 3], invariant=True)
    ordinary = grouped_linear(x, weight, [2, 0, 3])
    torch.testing.assert_close(out, ordinary)
    for one, two in zip(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (out, ordinary)), strict=True):
        torch.testing.assert_close(one, two)
