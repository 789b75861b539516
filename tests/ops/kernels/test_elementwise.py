"""Forward and backward of the hand-written functions against autograd of their formulas, in float64."""

import pytest
import torch
from torch.nn.functional import silu

from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels.spread import spread

G = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def same(ours, plain, *inputs):
    """Equal values and gradients; every input gets a gradient from both."""
    a, b = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    got, wanted = ours(*a), plain(*b)
    got, wanted = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, wanted))
    weights = [random(*x.shape) for x in wanted]
    for outs in (got, wanted):
        sum((x * w).sum() for x, w in zip(outs, weights, strict=True)).backward()
    for x, y in [*zip(got, wanted, strict=True), *((x.grad, y.grad) for x, y in zip(a, b, strict=True))]:
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_rms_norm_equals_its_formula():
    def plain(x, w):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w

    same(lambda x, w: kernels._RMSNorm.apply(x, w, 1e-3), plain, random(5, 2, 8), random(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_low_precision(dtype):
    x, w = random(5, 8).to(dtype), random(8).to(dtype)
    wanted = torch.nn.functional.rms_norm(x.double(), (8,), w.double(), 1e-6)
    got = kernels.rms_norm(x, w, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rms_norm_in_bfloat16_is_torchs_forward_and_nearer_backward():
    x, w, g = (random(*shape).bfloat16() for shape in ((300, 1, 64), (64,), (300, 1, 64)))

    def grads(norm, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = norm(*inputs)
        return out, torch.autograd.grad(out, inputs, g.to(out.dtype))

    def plain(x, w):
        return torch.nn.functional.rms_norm(x, (64,), w, 1e-6)

    out, ours = grads(lambda x, w: kernels.rms_norm(x, w, 1e-6), x, w)
    torchs, theirs = grads(plain, x, w)
    _, exact = grads(plain, x.double(), w.double())
    assert torch.equal(out, torchs)
    for a, b, wanted in zip(ours, theirs, exact, strict=True):
        assert a.dtype == torch.bfloat16
        error, other = ((y.double() - wanted).norm() / wanted.norm() for y in (a, b))
        assert 0 < error < 3e-3 and error < 1.1 * other


def test_swiglu_equals_its_formula():
    same(kernels.swiglu, lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], random(5, 1, 12))


def test_rotate_equals_its_formula():
    angle = random(6, 1, 4)
    cos, sin = angle.cos(), angle.sin()
    same(lambda x: kernels.rotate(x, cos, sin), lambda x: turned(x, cos, sin), random(6, 3, 8))


@pytest.mark.parametrize("neighbours", [False, True])
def test_rotation_of_a_part_of_a_head(neighbours):
    """Neighbours are halves of a head whose numbers are in another order."""
    angle = random(6, 1, 3)
    cos, sin = angle.cos(), angle.sin()
    order = torch.tensor([0, 2, 4, 1, 3, 5] if neighbours else [0, 1, 2, 3, 4, 5])

    def plain(x):
        part = turned(x[..., order], cos, sin)[..., order.argsort()]
        return torch.cat([part, x[..., 6:]], -1)

    same(lambda x: kernels.rotate(x, cos, sin, neighbours), plain, random(6, 3, 8))

    def both(mixed):
        q, k, v = (x.reshape(6, -1, 8) for x in mixed.split([2, 1, 1], 2))
        return plain(q), plain(k), v

    same(lambda mixed: kernels.split_and_rotate(mixed, cos, sin, neighbours), both, random(6, 3, 4, 8))


@pytest.mark.parametrize("groups, share", [(1, 3), (2, 2), (4, 1)])
def test_split_and_rotate_equals_its_formula(groups, share):
    angle = random(6, 1, 4)
    cos, sin = angle.cos(), angle.sin()

    def plain(mixed):
        q, k, v = mixed.split([share, 1, 1], 2)
        q, k, v = (x.reshape(6, -1, 8) for x in (q, k, v))
        return turned(q, cos, sin), turned(k, cos, sin), v

    same(lambda mixed: kernels.split_and_rotate(mixed, cos, sin), plain, random(6, groups, share + 2, 8))


def test_spread_and_collect_are_gathers_with_exact_gradients():
    index = torch.tensor([0, 2, 0, 1])  # cell 2 is padding: a copy of something
    inverse = torch.tensor([0, 3, 1])
    x, w = random(3, 2).requires_grad_(), random(4, 2)
    w[2] = 0  # nothing depends on padding
    (spread(x, index, inverse) * w).sum().backward()
    assert torch.equal(x.grad, w[inverse])
    same(lambda x: kernels.collect(x, inverse), lambda x: x[inverse], random(4, 2))
