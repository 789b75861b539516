"""Operations of one pass over memory: which tensors they take, and what those without storage give."""

import pytest
import torch

from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels import fused
from aligner.ops.kernels.experts import Pairs, combine, expand
from aligner.ops.kernels.logprobs import logit_numbers, token_logprobs


@pytest.fixture(autouse=True)
def meta(monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", {"meta"})
    fused.operations()


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def test_a_gate_halves_the_last_dimension_and_keeps_only_its_input():
    x = empty(5, 1, 12)
    out = fused.gated(x, "silu")
    kept = [t.shape for t in out.grad_fn.saved_tensors]
    out.sum().backward()
    assert out.shape == (5, 1, 6) and out.dtype == torch.bfloat16 and x.grad.shape == x.shape
    assert kept == [x.shape]


def test_queries_keys_and_values_are_dense_and_their_gradients_one_tensor():
    mixed, angles = empty(5, 3, 4, 8), [torch.empty(5, 1, 3, device="meta") for _ in range(2)]
    outs = kernels.split_and_rotate(mixed, *angles)
    torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])
    assert [x.shape for x in outs] == [(5, 6, 8), (5, 3, 8), (5, 3, 8)] and all(x.is_contiguous() for x in outs)
    assert mixed.grad.shape == mixed.shape
    query = empty(5, 2, 16)[:, :, :8]
    assert kernels.rotate(query, *angles, neighbours=True).shape == query.shape


def test_rows_of_experts_are_kept_once():
    x, weights, order = empty(5, 16), empty(5, 4), torch.empty(20, dtype=torch.int64, device="meta")
    pairs = Pairs(order, order, order, 4)
    rows = expand(x, pairs)
    out = combine(rows, pairs, weights)
    kept = [t.shape for t in out.grad_fn.saved_tensors]
    out.backward(torch.empty_like(out))
    assert kept == [(20, 16), (20,), (5, 4)] and rows.shape == (20, 16) and out.shape == x.grad.shape == x.shape
    assert weights.grad.shape == weights.shape


@pytest.mark.parametrize("entropy", [False, True])
def test_logprobs_keep_logits_and_a_few_numbers_of_each_row(entropy):
    logits, targets = empty(5, 40), torch.empty(5, dtype=torch.int64, device="meta")
    outs = token_logprobs(logits, targets, temperature=0.5, vocab_size=33, entropy=entropy)
    outs = [x for x in outs if x is not None]
    kept = [t for t in outs[0].grad_fn.saved_tensors if t is not None]
    assert sorted(t.numel() for t in kept) == [5] * (2 + entropy) + [200]
    torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])
    assert len(outs) == 1 + entropy and all(x.shape == (5,) and x.dtype == torch.float32 for x in outs)
    assert logits.grad.shape == logits.shape and logits.grad.dtype == torch.bfloat16


def test_a_logit_has_no_softmax_beside_it(monkeypatch):
    assert [logit_numbers(empty(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)] == [1, 2]
    monkeypatch.undo()
    assert logit_numbers(torch.empty(2, dtype=torch.bfloat16)) == 3


def test_only_a_gpus_tensors_of_at_most_32_bits_are_taken(monkeypatch):
    assert fused.takes(empty(2)) and not fused.takes(empty(2, dtype=torch.float64))
    monkeypatch.undo()
    assert not fused.takes(torch.empty(2)) and {"cuda"} >= fused.DEVICES
