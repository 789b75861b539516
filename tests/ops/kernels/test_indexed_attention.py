"""Attention to chosen tokens, against loops in float64."""

import pytest
import torch

from aligner.ops.kernels import indexed_attention as module
from aligner.ops.kernels.indexed_attention import Index, Lesson, chosen, indexed_attention

ROWS, QUERIES, KEYS, HEADS = 2, 5, 9, 3


def drawn(top_k: int) -> Index:
    """Compares small integers, so that many scores are equal."""
    g = torch.Generator().manual_seed(0)
    query, key = (
        torch.randint(-1, 2, shape, generator=g).float() for shape in ((ROWS, QUERIES, HEADS, 4), (ROWS, KEYS, 4))
    )
    return Index(query, torch.randint(-1, 3, (ROWS, QUERIES, HEADS), generator=g).float(), key, top_k)


def by_loops(index: Index, seen: torch.Tensor) -> torch.Tensor:
    """A choice by sorting: the highest score first, of equal ones the earliest key."""
    used = torch.zeros(ROWS, QUERIES, KEYS, dtype=torch.bool)
    for row in range(ROWS):
        for query in range(QUERIES):
            keys = [key for key in range(KEYS) if seen[row, query, key]]
            scores = {
                key: sum(
                    float(index.weight[row, query, head])
                    * max(0.0, float(index.query[row, query, head].double() @ index.key[row, key].double()))
                    for head in range(HEADS)
                )
                for key in keys
            }
            used[row, query, sorted(keys, key=lambda key: (-scores[key], key))[: index.top_k]] = True
    return used


@pytest.mark.parametrize("block", [1, 60, 1 << 26])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 9, 20])
def test_a_choice_is_that_of_a_sorted_list(monkeypatch, top_k, block):
    monkeypatch.setattr(module, "BLOCK", block)
    index = drawn(top_k)
    causal = (torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + KEYS - QUERIES).expand(ROWS, QUERIES, KEYS)
    sparse = causal & (torch.arange(KEYS) % 3 != 1)
    for seen in (causal, sparse):
        used = chosen(index, seen)
        assert torch.equal(used, by_loops(index, seen))
        assert (used.sum(2) == seen.sum(2).clamp_max(top_k)).all()


@pytest.mark.parametrize("block", [1, 40, 1 << 26])
@pytest.mark.parametrize("mask", ["causal", "bool", "added"])
def test_forward_and_backward_equal_the_reference(monkeypatch, mask, block):
    monkeypatch.setattr(module, "BLOCK", block)
    g = torch.Generator().manual_seed(1)
    exact = [torch.randn(ROWS, 2, n, 8, generator=g, dtype=torch.float64) for n in (QUERIES, KEYS, KEYS)]
    inputs = [x.float().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    seen = (torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + KEYS - QUERIES)[None, None]
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    passed = {"causal": None, "bool": seen, "added": added}[mask]
    index = drawn(3)
    out = indexed_attention(*inputs, passed, 0.3, index)
    used = by_loops(index, seen[0].expand(ROWS, -1, -1))[:, None]
    query, key, value = exact
    wanted = (query @ key.transpose(2, 3) * 0.3).masked_fill(~used, -torch.inf).softmax(3) @ value
    assert torch.allclose(out.double(), wanted, atol=1e-6)
    weight = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    (out * weight.float()).sum().backward()
    (wanted * weight).sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-5)


@pytest.mark.parametrize("top_k", [3, KEYS])
@pytest.mark.parametrize("block", [1, 40, 1 << 26])
def test_scores_learn_what_attention_weighs(monkeypatch, block, top_k):
    """The index has the gradient of the divergence of softmax(scores) from the heads' mean weights; queries, keys and
    values have none of it."""
    monkeypatch.setattr(module, "BLOCK", block)
    g = torch.Generator().manual_seed(1)
    exact = [torch.randn(ROWS, 2, n, 8, generator=g, dtype=torch.float64) for n in (QUERIES, KEYS, KEYS)]
    inputs = [x.float().requires_grad_() for x in exact]
    shapes = (ROWS, QUERIES, HEADS, 4), (ROWS, QUERIES, HEADS), (ROWS, KEYS, 4)
    index = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    learned = [x.detach().float().requires_grad_() for x in index]
    factors, total = torch.rand(ROWS * QUERIES, generator=g), torch.zeros((), dtype=torch.float64)
    out = indexed_attention(*inputs, None, 0.3, Index(*learned, top_k, Lesson(factors, total, ())))
    (plain,) = torch.autograd.grad(
        indexed_attention(*inputs, None, 0.3, Index(*(x.detach() for x in learned), top_k)).sum(), inputs[:1]
    )
    out.sum().backward()
    torch.testing.assert_close(inputs[0].grad, plain, rtol=1e-5, atol=1e-6)

    causal = (torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + KEYS - QUERIES).expand(ROWS, QUERIES, KEYS)
    used = by_loops(Index(*(x.detach() for x in index), top_k), causal)
    query, weight, key = index
    scores = torch.einsum("bnhm,bnh->bnm", torch.einsum("bnhd,bmd->bnhm", query, key).relu(), weight)
    logs = scores.masked_fill(~used, -torch.inf).log_softmax(2)
    target = (exact[0] @ exact[1].transpose(2, 3) * 0.3).masked_fill(~used[:, None], -torch.inf).softmax(3).mean(1)
    divergence = torch.nn.functional.kl_div(logs[used], target[used], reduction="none")
    each = torch.zeros(ROWS, QUERIES, KEYS, dtype=torch.float64).masked_scatter(used, divergence).sum(2)
    loss = (each * factors.double().view(ROWS, QUERIES)).sum()
    loss.backward()
    assert total.item() == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(learned, index, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-5)
