import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.kernels import logprobs as ops_logprobs
from tests.operations import Bytes


def token_logprobs(logits, tokens, **kwargs):
    """Rows [B, T] shifted and laid end to end: index t gets what logits[:, t-1] say of tokens[:, t]."""
    lp, h = ops_logprobs.token_logprobs(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), **kwargs)
    lp, h = (x if x is None else torch.nn.functional.pad(x.view(len(tokens), -1), (1, 0)) for x in (lp, h))
    return lp, h


def reference(logits, tokens, temperature, vocab_size):
    """float64, one position at a time, nothing but exp and log."""
    rows, width = tokens.shape
    logprobs, entropy = torch.zeros(rows, width).double(), torch.zeros(rows, width).double()
    for b in range(rows):
        for t in range(1, width):
            z = logits[b, t - 1, :vocab_size].double() / temperature
            p = torch.exp(z - z.max())
            p = p / p.sum()
            logprobs[b, t] = torch.log(p[tokens[b, t]])
            entropy[b, t] = -(p * torch.log(p)).sum()
    return logprobs, entropy


def make(rows=3, width=7, columns=12, vocab_size=10, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, columns, generator=g) * 3).to(dtype)
    tokens = torch.randint(vocab_size, (rows, width), generator=g)
    return logits, tokens, torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 6, 4096])
def test_values_and_gradients_are_those_of_the_float64_loop(temperature, chunk):
    logits, tokens, wl, we = make()
    exact = logits.double().requires_grad_()
    lp, h = reference(exact, tokens, temperature, 10)
    ((lp * wl).sum() + (h * we).sum()).backward()
    ours = logits.clone().requires_grad_()
    got, got_h = token_logprobs(ours, tokens, temperature=temperature, vocab_size=10, chunk_tokens=chunk, entropy=True)
    ((got * wl).sum() + (got_h * we).sum()).backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), lp.detach(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(got_h.double(), h.detach(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=3e-6, rtol=1e-5)
    assert (got[:, 0] == 0).all() and (got_h[:, 0] == 0).all()
    assert (ours.grad[:, -1] == 0).all() and (ours.grad[..., 10:] == 0).all()


@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1)])
def test_gradcheck_in_float64(weights):
    logits, tokens, wl, we = make(rows=2, width=4, columns=6, vocab_size=5, dtype=torch.float64)
    wl, we = wl.double(), we.double()

    def f(x):
        lp, h = token_logprobs(x, tokens, temperature=0.7, vocab_size=5, chunk_tokens=2, entropy=True)
        used = [(o * w).sum() for o, w, use in ((lp, wl, weights[0]), (h, we, weights[1])) if use]
        return sum(used)

    assert torch.autograd.gradcheck(f, logits.requires_grad_())


def test_without_entropy_the_logprobs_and_their_gradient_are_the_same():
    logits, tokens, wl, _ = make()
    grads = []
    for entropy in (False, True):
        x = logits.clone().requires_grad_()
        lp, h = token_logprobs(x, tokens, temperature=0.8, vocab_size=10, entropy=entropy)
        assert (h is None) is not entropy
        (lp * wl).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_padding_columns_have_no_say_even_if_huge_or_nan():
    logits, tokens, wl, _ = make()
    clean = logits[..., :10].clone().requires_grad_()
    dirty = logits.clone()
    dirty[..., 10], dirty[..., 11] = 1e9, math.nan
    dirty.requires_grad_()
    a, _ = token_logprobs(clean, tokens, vocab_size=10)
    b, _ = token_logprobs(dirty, tokens, vocab_size=10)
    assert torch.equal(a, b)
    (a * wl).sum().backward()
    (b * wl).sum().backward()
    assert torch.equal(dirty.grad[..., :10], clean.grad) and (dirty.grad[..., 10:] == 0).all()


def test_bfloat16_logits_are_computed_in_float32_and_get_a_bfloat16_gradient():
    logits, tokens, wl, we = make(dtype=torch.bfloat16)
    x = logits.clone().requires_grad_()
    lp, h = token_logprobs(x, tokens, temperature=1.3, vocab_size=10, chunk_tokens=4, entropy=True)
    want, want_h = reference(logits, tokens, 1.3, 10)
    torch.testing.assert_close(lp.double(), want, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(h.double(), want_h, atol=2e-6, rtol=1e-6)
    ((lp * wl).sum() + (h * we).sum()).backward()
    exact = logits.double().requires_grad_()
    a, b = reference(exact, tokens, 1.3, 10)
    ((a * wl).sum() + (b * we).sum()).backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, exact.grad.to(torch.bfloat16), atol=1e-6, rtol=1e-2)


def test_transposed_logits_and_minus_infinity():
    logits, tokens, wl, we = make()
    tokens = tokens.clamp_max(8)
    logits[..., 9] = -math.inf
    x = logits.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    lp, h = token_logprobs(x, tokens, vocab_size=10, entropy=True)
    want, want_h = token_logprobs(logits[..., :9], tokens, vocab_size=9, entropy=True)
    torch.testing.assert_close(lp, want)
    torch.testing.assert_close(h, want_h)
    ((lp * wl).sum() + (h * we).sum()).backward()
    assert x.grad.isfinite().all() and (x.grad[..., 9] == 0).all()


def test_large_logits_do_not_overflow_and_uniform_entropy_is_log_v():
    logits = torch.zeros(1, 3, 8)
    logits[0, 0, 3] = 1e4
    lp, h = token_logprobs(logits, torch.tensor([[0, 3, 5]]), vocab_size=8, entropy=True)
    assert lp.tolist()[0] == pytest.approx([0, 0, -math.log(8)])
    assert h.tolist()[0] == pytest.approx([0, 0, math.log(8)])


def test_one_token_rows_and_a_token_outside_the_vocabulary():
    logits = torch.randn(2, 1, 5, requires_grad=True)
    lp, _ = token_logprobs(logits, torch.zeros(2, 1, dtype=torch.long), vocab_size=5)
    assert lp.tolist() == [[0], [0]]
    lp.sum().backward()
    assert (logits.grad == 0).all()
    with pytest.raises(AssertionError, match="vocab_size=4"):
        token_logprobs(torch.randn(2, 2, 5), torch.full((2, 2), 4), vocab_size=4)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 6),
    vocab=st.integers(1, 9),
    pad=st.integers(0, 3),
    chunk=st.integers(1, 20),
    temperature=st.floats(0.2, 4),
    seed=st.integers(0, 1000),
)
def test_logprobs_of_any_shape_equal_the_reference(rows, width, vocab, pad, chunk, temperature, seed):
    logits, tokens, _, _ = make(rows, width, vocab + pad, vocab, torch.float64, seed)
    lp, h = token_logprobs(logits, tokens, temperature=temperature, vocab_size=vocab, chunk_tokens=chunk, entropy=True)
    want, want_h = reference(logits, tokens, temperature, vocab)
    torch.testing.assert_close(lp, want, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(h, want_h, atol=1e-9, rtol=1e-9)


def test_no_full_float32_tensor_is_made_beside_the_gradient():
    logits, tokens, _, _ = make(rows=4, width=65, columns=512, vocab_size=512, dtype=torch.bfloat16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    x = logits.requires_grad_()
    with Watch():
        lp, h = token_logprobs(x, tokens, vocab_size=512, chunk_tokens=32, temperature=0.9, entropy=True)
        (lp + h).sum().backward()
    assert 0 < largest <= 32 * 512


def test_chunks_for_the_cache_change_no_bit(monkeypatch):
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 64, generator=g), torch.randint(0, 60, (50,), generator=g)
    whole, calls, results = ops_logprobs._whole, [], []
    monkeypatch.setattr(ops_logprobs, "_whole", lambda z, *rest: (calls.append(len(z)), whole(z, *rest))[1])
    for size in (1 << 19, 64 * 7):
        monkeypatch.setattr(ops_logprobs, "IN_CACHE", size)
        x = logits.clone().requires_grad_()
        lp, h = ops_logprobs.token_logprobs(x, targets, temperature=0.7, vocab_size=60, entropy=True)
        (lp.sum() + h.sum()).backward()
        results.append((lp, h, x.grad))
    assert calls == [50] + [7] * 7 + [1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_the_logits_takes_twelve_bytes_for_each(ranks, entropy, world):
    """What `batch.logits_bytes` and the planner count with: bfloat16 logits and their gradient, two float32 numbers."""
    for most in ranks.run("tests.ops.kernels.test_logprobs:bytes_of_a_part", world=world, entropy=entropy):
        assert 10 < most <= 12.1


def bytes_of_a_part(entropy: bool) -> float:
    """Of each logit, in forward and backward, all of them in one chunk."""
    group = torch.distributed.group.WORLD
    logits = torch.randn(64, 4096).bfloat16().requires_grad_()
    targets, out = torch.arange(64), torch.randn(64)
    with Bytes() as bytes_:
        lp, h = ops_logprobs.token_logprobs(
            logits, targets, vocab_size=group.size() * 4096, group=group, chunk_tokens=64, entropy=entropy
        )
        ((lp + h if entropy else lp) * out).sum().backward()
    return 2 + bytes_.most / logits.numel()
