"""Attention with explicit scores, against the formula in float64 and against torch's own where nothing is capped."""

import pytest
import torch

from aligner.config.sections.model.attention import ScalesConfig
from aligner.ops.kernels import scored_attention as module
from aligner.ops.kernels.scored_attention import (
    capped,
    fused_attention,
    scaled_logits,
    scored_attention,
    sink_attention,
)


def plain(q, k, v, seen, scale, softcap):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("block", [1, 70, 1 << 24])
@pytest.mark.parametrize("mask", ["causal", "bool", "added", "rows"])
def test_forward_and_backward_equal_the_reference(monkeypatch, block, mask):
    """Also where queries are the last ones of their keys, and in blocks that are made again in backward."""
    monkeypatch.setattr(module, "BLOCK", block)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=g, dtype=torch.float64) for heads, n in ((6, 5), (3, 9), (3, 9)))
    seen = torch.arange(9) <= torch.arange(5)[:, None] + 4
    if mask != "causal":
        seen = seen & (torch.arange(9) > torch.arange(5)[:, None])
    seen = seen.expand(2, 1, 5, 9) if mask == "rows" else seen[None, None]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    values = {"causal": None, "bool": seen, "added": added, "rows": added}[mask]
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    got = scored_attention(*inputs, None if values is None else values if mask == "bool" else values.float(), 0.3, 0.8)
    wanted = plain(*exact, seen, 0.3, 0.8)
    assert torch.allclose(got.double(), wanted, atol=1e-6)
    weight = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    (got * weight.float()).sum().backward()
    (wanted * weight).sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-5)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 3.0, 40.0])
@pytest.mark.parametrize("mask", ["causal", "bool", "added"])
def test_sinks_join_the_softmax(mask, sink):
    """Also where queries are the last ones of their keys; one far below the scores is none, one far above leaves 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=g, dtype=torch.float64) for heads, n in ((6, 5), (3, 9), (3, 9)))
    sinks, scale = sink + torch.randn(6, generator=g, dtype=torch.float64), 0.3
    seen = (torch.arange(9) <= torch.arange(5)[:, None] + 4)[None, None]
    if mask != "causal":
        seen = seen & (torch.arange(9) > torch.arange(5)[:, None])
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    values = {"causal": None, "bool": seen, "added": added}[mask]
    inputs = [x.float().requires_grad_() for x in (q, k, v, sinks)]
    exact = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    got = sink_attention(*inputs[:3], values, scale, inputs[3])

    q, k, v, sinks = exact
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    both = torch.cat([scores, sinks[:, None, None].expand(2, 6, 5, 1)], -1)
    wanted = both.softmax(-1)[..., :-1] @ v
    assert torch.allclose(got.double(), wanted, atol=1e-6)
    weight = torch.randn(wanted.shape, generator=g, dtype=torch.float64)
    (got * weight.float()).sum().backward()
    (wanted * weight).sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-5)


def test_a_cap_far_away_is_none():
    q, k, v = torch.randn(3, 2, 4, 11, 8).unbind()
    q, k, v = (x[:2] for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(scored_attention(q, k, v, None, None, 1e4), wanted, atol=1e-5)
    assert torch.allclose(capped(q, 1e4), q, atol=1e-5) and capped(q * 1e6, 2.0).abs().max() <= 2


def test_logits_are_scaled_and_capped():
    logits = torch.randn(3, 7)
    assert scaled_logits(logits, ScalesConfig()) is logits
    assert torch.equal(scaled_logits(logits, ScalesConfig(logits=4.0)), logits / 4)
    both = scaled_logits(logits, ScalesConfig(logits=0.5, logits_softcap=3.0))
    assert torch.allclose(both, 3 * torch.tanh(2 * logits / 3))


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_short_rows_in_bfloat16(monkeypatch, masked, width):
    """Their backward is in float32, so as near to the formula as inputs and outputs in bfloat16 let it be. Forward they
    are torch's."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, d, generator=g) for n, h, d in ((40, 6, 16), (40, 3, 16), (40, 3, width)))
    seen = (torch.arange(40) <= torch.arange(40)[:, None]).expand(2, 1, 40, 40)
    if masked:
        seen = seen & (torch.arange(40) >= torch.arange(40)[:, None] - 7)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if masked else None
    weight = torch.randn(2, 6, 40, width, generator=g)

    def run(dtype, short):
        monkeypatch.setattr(module, "SHORT", short)
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        out = fused_attention(*(x.transpose(1, 2) for x in inputs), None if mask is None else mask.to(dtype), 0.3)
        (out.float() * weight).sum().backward()
        return out.detach(), [x.grad.float() for x in inputs]

    exact, exact_grads = run(torch.float32, 256)
    out, grads = run(torch.bfloat16, 256)
    plain, plain_grads = run(torch.bfloat16, 0)
    assert torch.equal(out, plain)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)
    for ours, torchs, wanted in zip(grads, plain_grads, exact_grads, strict=True):
        error, other = ((x - wanted).norm() / wanted.norm() for x in (ours, torchs))
        assert 0 < error < 5e-3 and error < 1.1 * other
