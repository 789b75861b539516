"""Routing, sorting and grouped products against loops in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from aligner.config.sections.model.moe import MoeConfig
from aligner.ops.kernels import experts, fused
from aligner.ops.kernels.experts import (
    ReplayedExperts,
    add_bias,
    balance_loss,
    clamped_gate,
    combine,
    combine_own,
    expand,
    grouped_linear,
    route,
    route_by_groups,
    sort_own_pairs,
    sort_pairs,
)
from aligner.ops.kernels.spread import spread


def mixture(x, router, gate, down, k, normalise):
    """Token by token, expert by expert."""
    rows = []
    for token in x:
        p = (router @ token).softmax(0)
        top = p.argsort(descending=True, stable=True)[:k].tolist()
        total = sum(p[e] for e in top) if normalise else 1.0
        rows.append(sum(p[e] / total * (down[e] @ torch.tanh(gate[e] @ token)) for e in top))
    return torch.stack(rows)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 6), st.data(), st.booleans(), st.integers(0, 2**31))
def test_a_mixture_and_its_gradients(n, num_experts, data, normalise, seed):
    k = data.draw(st.integers(1, num_experts))
    g = torch.Generator().manual_seed(seed)
    shapes = [(n, 4), (num_experts, 4), (num_experts, 3, 4), (num_experts, 5, 3)]
    leaves = [torch.randn(shape, generator=g, dtype=torch.float64).float().double() for shape in shapes]
    wanted_leaves, got_leaves = ([t.clone().requires_grad_() for t in leaves] for _ in range(2))
    wanted = mixture(*wanted_leaves, k, normalise)
    x, router, gate, down = got_leaves
    routing = route(x, router, k, normalise)
    pairs, counts = sort_pairs(routing.experts, num_experts)
    hidden = torch.tanh(grouped_linear(expand(x, pairs), gate, counts))
    got = combine(grouped_linear(hidden, down, counts.tolist()), pairs, routing.weights)
    assert torch.allclose(got, wanted, atol=1e-5)
    weight = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad((t * weight).sum(), ls)
                              for t, ls in ((got, got_leaves), (wanted, wanted_leaves))), strict=True):  # fmt: skip
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_an_expert_that_was_not_chosen_has_no_gradient():
    g = torch.Generator().manual_seed(1)
    x, router = torch.randn(3, 8, generator=g), torch.randn(9, 8, generator=g).requires_grad_()
    routing = route(x, router, 2, True)
    (routing.weights * torch.randn(3, 2, generator=g)).sum().backward()
    idle = torch.ones(9, dtype=torch.bool)
    idle[routing.experts.flatten()] = False
    assert not router.grad[idle].any() and router.grad[~idle].any()


def test_pairs_lie_by_expert_and_by_token():
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    pairs, counts = sort_pairs(experts, 4)
    assert counts.tolist() == [2, 2, 2, 0]
    assert pairs.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert experts.flatten()[pairs.order].tolist() == [0, 0, 1, 1, 2, 2]
    x = torch.randn(6, 3)
    assert torch.equal(spread(x[pairs.order], pairs.inverse, pairs.order), x)


@pytest.mark.parametrize("on_host", [True, False])
def test_ranks_with_some_of_the_experts_add_up_to_all(on_host, monkeypatch):
    """Where the host does not know how many pairs are a rank's, no number behind theirs counts."""
    g, (n, width, num_experts, top_k) = torch.Generator().manual_seed(3), (9, 6, 7, 3)
    x, matrices = torch.randn(n, width, generator=g), torch.randn(num_experts, width, width, generator=g)
    chosen = torch.rand(n, num_experts, generator=g).argsort(1)[:, :top_k]
    weights, total = torch.rand(n, top_k, generator=g), torch.zeros(n, width)
    for own in (range(3), range(3, 5), range(5, 7)):
        with monkeypatch.context() as patched:
            if not on_host:
                patched.setattr(experts, "in_one_kernel", lambda x: True)
                patched.setattr(fused, "takes", lambda x: True)
            pairs, counts = sort_own_pairs(chosen, num_experts, own, x)
        assert counts.tolist() == [int((chosen == expert).sum()) for expert in own]
        if on_host:
            out = grouped_linear(expand(x, pairs), matrices[own.start : own.stop], counts)
            total += combine_own(out, pairs, weights)
            continue
        assert len(pairs.tokens) == n * min(top_k, len(own))
        out = torch.full((len(pairs.tokens), width), torch.nan)
        for row, pair in enumerate(pairs.order[: counts.sum()]):
            assert pairs.tokens[row] == pair // top_k
            out[row] = matrices[chosen.flatten()[pair]] @ x[pairs.tokens[row]]
        for pair, row in enumerate(pairs.inverse):  # as the kernel reads them
            total[pair // top_k] += weights.flatten()[pair] * out[row] if row < len(out) else 0
    wanted = torch.einsum("nk,nkoi,ni->no", weights, matrices[chosen], x)
    assert torch.allclose(total, wanted, atol=1e-5)


def test_no_tokens_at_all():
    routing = route(torch.zeros(0, 4), torch.zeros(3, 4), 2, True)
    pairs, counts = sort_pairs(routing.experts, 3)
    x = torch.zeros(0, 4, requires_grad=True)
    each = add_bias(grouped_linear(expand(x, pairs), torch.zeros(3, 4, 4), counts), torch.ones(3, 4), counts)
    out = combine(each, pairs, routing.weights)
    assert out.shape == (0, 4)
    out.sum().backward()


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0]])
def test_each_row_gets_its_experts_bias(sizes):
    x, bias = torch.randn(9, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    weights, rows = torch.randn(9, 6), torch.arange(4).repeat_interleave(torch.tensor(sizes))
    actual = add_bias(x, bias, torch.tensor(sizes))
    assert torch.equal(actual, x + bias[rows])
    d_x, d_bias = torch.autograd.grad((actual * weights).sum(), (x, bias))
    wanted = torch.stack([weights.double()[rows == expert].sum(0) for expert in range(4)])
    assert torch.equal(d_x, weights) and torch.allclose(d_bias.double(), wanted, atol=1e-5)


def test_the_clamped_gate_is_that_of_transformers():
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=50))
    x = 15 * torch.randn(40, 100, dtype=torch.float64)
    x[0, ::7] = 7.0
    x.requires_grad_()
    mixed = torch.stack(x.chunk(2, 1), 2).flatten(1)  # whose gates and ups alternate
    actual, wanted, weights = clamped_gate(x), experts._apply_gate(mixed), torch.randn(40, 50)
    assert torch.allclose(actual, wanted, rtol=1e-12)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (actual, wanted))
    assert torch.allclose(ours, theirs, rtol=1e-12) and (theirs == 0).any()


def test_the_router_decides_in_float32():
    x, router = torch.randn(200, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    assert torch.equal(route(x, router, 2, True).experts, route(x.float(), router.float(), 2, True).experts)


@pytest.mark.parametrize(("fractions", "probs", "wanted"), [
    ([0.25] * 4, [0.25] * 4, 1.0), ([1, 0, 0, 0], [1, 0, 0, 0], 4.0), ([1, 0, 0, 0], [0, 1, 0, 0], 0.0),
])  # fmt: skip
def test_the_balance_loss_is_one_where_even(fractions, probs, wanted):
    assert float(balance_loss(torch.tensor(probs), torch.tensor(fractions))) == pytest.approx(wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernel_on_cuda_equals_the_loop():
    sizes = torch.tensor([16, 0, 40, 8])
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(4, 48, 32).bfloat16()
    leaves = [x.cuda().requires_grad_(), w.cuda().requires_grad_()]
    plain = [x.float().requires_grad_(), w.float().requires_grad_()]
    got, wanted = grouped_linear(*leaves, sizes.cuda()), grouped_linear(*plain, sizes)
    assert torch.allclose(got.float().cpu(), wanted, rtol=2e-2, atol=2e-1)
    for ours, theirs in zip(torch.autograd.grad(got.contiguous().mul(1.0).sum(), leaves),
                            torch.autograd.grad(wanted.sum(), plain), strict=True):  # fmt: skip
        assert torch.allclose(ours.float().cpu(), theirs, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(1, 1, 3), (4, 2, 5), (5, 1, 2), (2, 2, 9)])
def test_routing_by_groups_is_deepseeks(groups, top_groups, top_k, normalise):
    """Against transformers' router, on random scores and biases; gradients of chosen scores alone."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    experts = 20
    moe = MoeConfig(experts, top_k, 8, normalise, groups=groups, top_groups=top_groups, scale=1.7)
    names = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "n_group": groups, "topk_group": top_groups}
    config = DeepseekV3Config(hidden_size=16, routed_scaling_factor=1.7, norm_topk_prob=normalise, **names)
    theirs, g = DeepseekV3TopkRouter(config), torch.Generator().manual_seed(top_k)
    x = torch.randn(200, 16, generator=g)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(experts, 16, generator=g))
        theirs.e_score_correction_bias.copy_(0.5 * torch.randn(experts, generator=g))
    weight = theirs.weight.detach().clone().requires_grad_()
    actual = route_by_groups(x, weight, theirs.e_score_correction_bias, moe)
    _, weights, chosen = theirs(x)
    order, other = actual.experts.argsort(1), chosen.argsort(1)
    assert torch.equal(actual.experts.gather(1, order), chosen.gather(1, other))
    assert torch.allclose(actual.weights.gather(1, order), weights.gather(1, other), atol=1e-6)
    assert torch.allclose(actual.probs.sum(1), torch.ones(200)) and torch.equal(actual.own, actual.experts)
    factor = torch.randn(200, top_k, generator=g)
    (factor * actual.weights.gather(1, order)).sum().backward()
    (factor * weights.gather(1, other)).sum().backward()
    assert torch.allclose(weight.grad, theirs.weight.grad, atol=1e-5)
    elsewhere = ReplayedExperts(actual.experts.flip(0), torch.arange(200) % 2 == 0)
    again = route_by_groups(x, weight, theirs.e_score_correction_bias, moe, elsewhere)
    assert torch.equal(again.experts[::2], actual.experts.flip(0)[::2]) and torch.equal(again.own, actual.own)
    assert torch.equal(again.experts[1::2], actual.experts[1::2])
