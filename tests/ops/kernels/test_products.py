import pytest
import torch

from aligner.ops.kernels import bfloat16_products, products
from aligner.ops.kernels.products import product_into, shape_step

A, B, BASE = torch.randn(3, 5, 64), torch.randn(3, 64, 7), torch.randn(3, 5, 7)


@pytest.mark.parametrize("base", [None, BASE[0], BASE[0, 0]], ids=["alone", "plus a matrix", "plus a row"])
@pytest.mark.parametrize("slow", [True, False])
def test_a_product_is_written_into_its_place(monkeypatch, slow, base):
    monkeypatch.setattr(bfloat16_products, "_slow_here", lambda: slow)
    for dtype in (torch.bfloat16, torch.float32):
        a, b = A[0].to(dtype), B[0].to(dtype)
        added = None if base is None else base.to(dtype)
        exact = a.double() @ b.double() + (0 if added is None else added.double())
        out = torch.empty(5, 7, dtype=dtype)
        assert product_into(out, a, b, added) is out
        torch.testing.assert_close(out.double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_shapes_are_few_where_each_is_compiled(monkeypatch):
    cpu = torch.device("cpu")

    def steps(slow, leads):
        monkeypatch.setattr(bfloat16_products, "_slow_here", lambda: slow)
        monkeypatch.setattr(products, "onednn_leads", lambda: leads)
        assert shape_step(1000, torch.device("meta"), torch.bfloat16) == shape_step(1000, cpu, torch.float64) == 1
        return [shape_step(1000, cpu, dtype) for dtype in (torch.float32, torch.bfloat16)]

    assert [steps(*x) for x in ((True, False), (True, True), (False, False))] == [[1, 1], [32, 1], [1, 32]]
    assert [shape_step(n, cpu, torch.bfloat16) for n in (1, 31, 32, 2047, 2048)] == [1, 1, 2, 64, 128]
    rounded = {-(-n // step) * step for n in range(1024, 4097) for step in [shape_step(n, cpu, torch.bfloat16)]}
    assert len(rounded) == 33
