"""The chunked scan of Mamba-2 against its definition, token by token, and against transformers."""

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h as theirs

from aligner.config.sections.model.linear import LinearConfig
from aligner.ops.kernels.mamba2 import by_group, gated_norm, prepared, scan, scan_steps, still


def inputs(rows=2, length=11, groups=2, heads=4, dk=5, dv=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(rows, length, groups, dk, generator=g, dtype=dtype) for _ in "qk")
    value = torch.randn(rows, length, heads, dv, generator=g, dtype=dtype)
    step = 2 * torch.rand(rows, length, heads, generator=g, dtype=dtype)
    return (
        query,
        key,
        value,
        step,
        -torch.rand(heads, generator=g, dtype=dtype),
        torch.randn(heads, generator=g).to(dtype),
    )


def by_definition(query, key, value, step, rate, skip, state=None):
    """The docstring's formulas, one row, token and head at a time."""
    rows, length, heads, dv = value.shape
    times, dk = heads // key.shape[2], key.shape[3]
    state = torch.zeros(rows, heads, dk, dv, dtype=value.dtype) if state is None else state.clone()
    out = torch.empty_like(value)
    for r in range(rows):
        for h in range(heads):
            for t in range(length):
                d, x = step[r, t, h], value[r, t, h]
                state[r, h] = (d * rate[h]).exp() * state[r, h] + d * torch.outer(key[r, t, h // times], x)
                out[r, t, h] = state[r, h].T @ query[r, t, h // times] + skip[h] * x
    return out, state


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("began", [False, True])
def test_chunks_equal_the_definition(chunk, began):
    values = inputs()
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64) if began else None
    out, last = scan(*values, state, chunk)
    wanted, end = by_definition(*values, state)
    assert (out - wanted).abs().max() < 1e-12 and (last - end).abs().max() < 1e-12


def test_gradients_pass_gradcheck():
    values = [x.requires_grad_() for x in inputs(rows=1, length=5, groups=1, heads=2, dk=3, dv=2)]
    state = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: scan(*a, chunk=2), (*values, state))


def test_strong_forgetting_is_finite():
    query, key, value, step, rate, skip = (x.float().requires_grad_() for x in inputs(length=130))
    out, _ = scan(query, key, value, step, 100 * rate, skip)
    out.square().sum().backward()
    assert all(x.isfinite().all() for x in (out, query.grad, step.grad, rate.grad))


def test_token_by_token_is_the_same():
    query, key, value, step, rate, skip = (x.float() for x in inputs(length=70))
    wanted, end = scan(query, key, value, step, rate, skip)
    state = torch.zeros_like(end)
    for t in range(value.shape[1]):
        own = *(x[:, t : t + 1] for x in (query, key, value, step)), rate, skip
        tentative, out = (scan_steps(*own, state, changes=changes) for changes in (False, True))
        assert torch.equal(out, tentative)
        torch.testing.assert_close(out[:, 0], wanted[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-5)


def test_padding_leaves_the_state():
    values = inputs(length=9)
    _, wanted = scan(*(x[:, :6] if x.dim() > 1 else x for x in values))
    real = (torch.arange(9) < 6).expand(2, -1)
    assert (scan(*still(values, real))[1] - wanted).abs().max() < 1e-12


def test_small_steps_are_not_cut_off():
    """As config.json says by `time_step_limit`; transformers (5.23) makes them at least `time_step_min`."""
    query, key, value, _, rate, skip = inputs()
    step = torch.full((2, 11, 4), 1e-5, dtype=torch.float64)
    out, _ = scan(query, key, value, step, rate, 0 * skip)
    wanted, _ = by_definition(query, key, value, step, rate, 0 * skip)
    assert wanted.any() and (out - wanted).abs().max() < 1e-15


def test_scan_and_norm_equal_transformers():
    query, key, value, step, rate, skip = (x.float() for x in inputs(length=37, heads=6))
    wanted = theirs.mamba2_chunk_scan(value, step, rate, key, query, 8, skip)
    out, _ = scan(query, key, value, step, rate, skip)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    gate, norm = torch.randn_like(out), theirs.NemotronHRMSNormGated(18, group_size=9, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    linear = LinearConfig(2, 6, 5, 3, 4, rule="mamba2")
    got = gated_norm(out, gate, norm.weight, 1e-3, linear)
    torch.testing.assert_close(got.flatten(2), norm(out.flatten(2), gate.flatten(2)), rtol=1e-5, atol=1e-5)


def test_channels_of_a_group_are_together():
    """Files have x of all heads, then keys, then queries."""
    linear = LinearConfig(2, 4, 3, 5, 4, rule="mamba2")
    x, key, query = 100 + torch.arange(20), 200 + torch.arange(6), 300 + torch.arange(6)
    groups = by_group(torch.cat([x, key, query]), linear)
    assert groups[1].tolist() == [*range(303, 306), *range(203, 206), *range(110, 120)]
    mixed = torch.randn(2, 7, 2, linear.mixed_width + linear.numbers)
    weights = {
        "conv1d.weight": torch.zeros(2, linear.mixed_width, 4),
        "conv1d.bias": torch.zeros(2, linear.mixed_width),
    }
    weights["conv1d.weight"][..., -1] = 1  # a token's channels are its own
    weights |= {name: torch.zeros(4) for name in ("A_log", "dt_bias", "D")}
    q, k, v, step, rate, _ = prepared(mixed, weights, linear)
    channels = torch.nn.functional.silu(mixed[..., : linear.mixed_width])
    for own, wanted in zip((q, k, v.unflatten(2, (2, 2)).flatten(3)), channels.split([3, 3, 10], -1), strict=True):
        torch.testing.assert_close(own, wanted)
    torch.testing.assert_close(step, torch.nn.functional.softplus(mixed[..., linear.mixed_width :]).flatten(2))
    assert rate.tolist() == [-1] * 4
