"""Operations of one pass over memory: which tensors they take, and what those without storage give."""

import pytest
import torch

from aligner.ops.kernels import fused


@pytest.fixture(autouse=True)
def meta(monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", {"meta"})


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def test_a_gate_halves_the_last_dimension_and_keeps_only_its_input():
    x = empty(5, 1, 12)
    out = fused.gated(x, "silu")
    kept = [t.shape for t in out.grad_fn.saved_tensors]
    out.sum().backward()
    assert out.shape == (5, 1, 6) and out.dtype == torch.bfloat16 and x.grad.shape == x.shape
    assert kept == [x.shape]


def test_only_a_gpus_tensors_of_at_most_32_bits_are_taken(monkeypatch):
    assert fused.takes(empty(2)) and not fused.takes(empty(2, dtype=torch.float64))
    monkeypatch.undo()
    assert not fused.takes(torch.empty(2)) and {"cuda"} >= fused.DEVICES
