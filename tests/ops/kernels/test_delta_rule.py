"""The chunked gated delta rule against its definition, token by token."""

import pytest
import torch

from aligner.ops.kernels.delta_rule import causal_mix, delta_rule, delta_steps, gates


def inputs(rows=2, length=11, keys=2, values=4, dk=5, dv=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(rows, length, keys, dk, generator=g, dtype=dtype) for _ in "qk")
    value = torch.randn(rows, length, values, dv, generator=g, dtype=dtype)
    decay = -2 * torch.rand(rows, length, values, generator=g, dtype=dtype)
    return query, key, value, decay, torch.rand(rows, length, values, generator=g, dtype=dtype)


def by_definition(query, key, value, decay, beta, state=None):
    """The docstring's formulas, one row, token and head at a time."""
    rows, length, heads, dv = value.shape
    times, dk = heads // key.shape[2], key.shape[3]
    state = torch.zeros(rows, heads, dk, dv, dtype=value.dtype) if state is None else state.clone()
    out = torch.empty_like(value)
    for r in range(rows):
        for h in range(heads):
            memory = state[r, h]
            for t in range(length):
                q, k = query[r, t, h // times], key[r, t, h // times]
                q, k = q / (q @ q + 1e-6).sqrt() / dk**0.5, k / (k @ k + 1e-6).sqrt()
                memory = memory * decay[r, t, h].exp()
                memory = memory + torch.outer(k, beta[r, t, h] * (value[r, t, h] - memory.T @ k))
                out[r, t, h] = memory.T @ q
            state[r, h] = memory
    return out, state


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("began", [False, True])
def test_chunks_equal_the_definition(chunk, began):
    values = inputs()
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64) if began else None
    out, last = delta_rule(*values, state, chunk)
    wanted, end = by_definition(*values, state)
    assert (out - wanted).abs().max() < 1e-12 and (last - end).abs().max() < 1e-12


def test_gradients_pass_gradcheck():
    values = [x.requires_grad_() for x in inputs(rows=1, length=5, keys=1, values=2, dk=3, dv=2)]
    state = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: delta_rule(*a, chunk=2), (*values, state))


def test_strong_forgetting_is_finite():
    query, key, value, decay, beta = (x.float().requires_grad_() for x in inputs(length=130))
    out, _ = delta_rule(query, key, value, 100 * decay, beta)
    out.square().sum().backward()
    assert all(x.isfinite().all() for x in (out, query.grad, decay.grad, beta.grad))


def test_token_by_token_is_the_same():
    query, key, value, decay, beta = (x.float() for x in inputs(length=70))
    wanted, end = delta_rule(query, key, value, decay, beta)
    state, numbers = torch.zeros_like(end), (query, key, value, decay, beta)
    for t in range(0, value.shape[1], 2):
        own = [x[:, t : t + 2] for x in numbers]
        before, tentative = state.clone(), delta_steps(*own, state, changes=False)
        assert torch.equal(state, before)
        one, other = (delta_steps(*(x[:, i : i + 1] for x in own), state) for i in (0, 1))
        assert torch.equal(torch.cat([one, other], 1), tentative)
        assert (tentative - wanted[:, t : t + 2]).abs().max() < 1e-5, t
    assert (state - end).abs().max() < 1e-5


def test_padding_leaves_the_state():
    query, key, value, decay, beta = inputs(length=9)
    _, wanted = delta_rule(*(x[:, :6] for x in (query, key, value, decay, beta)))
    decay[:, 6:], beta[:, 6:] = 0, 0
    assert (delta_rule(query, key, value, decay, beta)[1] - wanted).abs().max() < 1e-12


def test_causal_mix_goes_on():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 7, 6, generator=g), torch.randn(6, 4, generator=g)
    whole = causal_mix(x, weight)
    wanted = sum(x[0, 2 - 3 + j, 1] * weight[1, j] for j in (1, 2, 3))  # the token at 2 has two before it
    assert whole[0, 2, 1] == pytest.approx(float(torch.nn.functional.silu(wanted)), abs=1e-6)
    rest = causal_mix(x[:, 4:], weight, x[:, 1:4])
    assert (rest - whole[:, 4:]).abs().max() < 1e-6


def test_gates_equal_their_formula():
    decay, beta = gates(*torch.zeros(2, 3), torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, 2.0]))
    assert beta.tolist() == [0.5] * 3
    softplus = torch.tensor([0.0, 0.0, 2.0]).exp().log1p()
    assert torch.allclose(decay, -torch.tensor([1.0, 2.718281828, 0.367879441]) * softplus)
