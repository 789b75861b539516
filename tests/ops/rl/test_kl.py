import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.ops.rl.kl import NOISE, adapt_kl_coef, kl_estimate, magnitude

D = [0.0, 1e-4, -1e-4, 0.3, -0.3, 2.0, -2.0, 25.0, -25.0]


def exact(name, d):
    c = max(-20.0, min(20.0, d))
    k3 = max(-10.0, min(10.0, math.exp(-c) - 1 + c))
    return {"k1": d, "k2": d * d / 2, "k3": k3, "abs": abs(d), "k1+": d, "k3+": k3}[name]


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_estimates_have_these_values(name):
    d = torch.tensor(D, dtype=torch.float64)
    got = kl_estimate(d - 1.0, torch.full_like(d, -1.0), name)
    torch.testing.assert_close(got, torch.tensor([exact(name, x) for x in D], dtype=torch.float64))
    assert kl_estimate(d.bfloat16(), torch.zeros(len(D)).bfloat16(), name).dtype == torch.float32


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
@given(d=st.floats(-1.9, 1.9).filter(lambda d: abs(d) > 1e-2))
def test_gradients_by_finite_differences(name, d):
    x = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    kl_estimate(x, torch.zeros_like(x), name).backward()
    assert float(x.grad) == pytest.approx((exact(name, d + 1e-6) - exact(name, d - 1e-6)) / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_straight_through_has_the_gradient_of_k2(name):
    x = torch.tensor(D, requires_grad=True)
    kl_estimate(x, torch.zeros(len(D)), name).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor(D))


@pytest.mark.parametrize("noise", NOISE.values())
def test_a_magnitude_has_no_gradient_in_the_noise_and_all_of_it_beyond(noise):
    d = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 100.0], dtype=torch.float64) * noise
    d = torch.cat([d, -d]).requires_grad_()
    value = magnitude(d, noise)
    assert torch.equal(value, d.abs())
    (slope,) = torch.autograd.grad(value.sum(), d)
    wanted = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(slope, torch.cat([wanted, -wanted]), rtol=1e-9, atol=1e-9)


def test_the_size_of_the_noise_is_that_of_the_models_dtype():
    x = torch.tensor(3e-3, requires_grad=True)
    for dtype, slope in ((torch.float32, 1.0), (torch.bfloat16, 0.0)):
        (gradients,) = torch.autograd.grad(kl_estimate(x, torch.zeros(()), "abs", NOISE[dtype]), x)
        assert float(gradients) == slope


def test_k3_is_never_negative_near_zero_in_float32():
    d = torch.linspace(-1e-3, 1e-3, 2001)
    assert (kl_estimate(d, torch.zeros_like(d), "k3") >= -1e-9).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_over_the_policy_is_the_kl(name):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    assert float((p * kl_estimate(p.log(), q.log(), name)).sum()) == pytest.approx(float((p * (p / q).log()).sum()))


@pytest.mark.parametrize("name", ["k1+", "k3+"])
def test_expected_straight_through_gradient_is_that_of_the_kl(name):
    q = torch.tensor([0.2, 0.5, 0.3]).double()
    z = torch.tensor([0.4, -0.1, 0.7]).double().requires_grad_()
    p = z.softmax(0)
    (true,) = torch.autograd.grad((p * (p.log() - q.log())).sum(), z, retain_graph=True)
    (ours,) = torch.autograd.grad((p.detach() * kl_estimate(p.log(), q.log(), name)).sum(), z)
    torch.testing.assert_close(ours, true)


def test_an_unknown_estimator_is_named():
    with pytest.raises(AssertionError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_the_controller_moves_towards_its_target():
    assert adapt_kl_coef(0.1, 0.05, 0.05, 256, 10000) == 0.1
    assert adapt_kl_coef(0.1, 0.055, 0.05, 100, 1000) == pytest.approx(0.1 * 1.01)
    assert adapt_kl_coef(0.1, 9.0, 0.05, 100, 1000) == pytest.approx(0.1 * 1.02)
    assert adapt_kl_coef(0.1, -9.0, 0.05, 100, 1000) == pytest.approx(0.1 * 0.98)
