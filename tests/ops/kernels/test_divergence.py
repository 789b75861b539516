import math

import pytest
import torch

from aligner.ops.kernels.divergence import Divergence, divergences
from aligner.ops.kernels.top import bucketed, log1mexp, logprobs_at, top_logprobs

N, V, COLUMNS = 9, 10, 12  # two columns of padding
KINDS = [
    *(Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("mixed", 0.3)),
    *(Divergence("jsd", 0.5), Divergence("jsd", 0.1), Divergence("jsd", 0.9)),
]


def make(dtype=torch.float32, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    student, teacher = ((torch.randn(N, COLUMNS, generator=g) * scale).to(dtype) for _ in range(2))
    return student, teacher, torch.rand(N, generator=g) + 0.5


def softmax(z):
    e = [math.exp(x - max(z)) for x in z]
    return [x / sum(e) for x in e]


def kl(p, q):
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a)


def by_hand(p, q, divergence):
    """One position, Python's floats."""
    beta = divergence.beta
    if divergence.kind == "jsd":
        middle = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        return beta * kl(p, middle) + (1 - beta) * kl(q, middle)
    share = {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed": beta}[divergence.kind]
    return share * kl(p, q) + (1 - share) * kl(q, p)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind} {d.beta}")
def test_values_are_those_of_a_loop(divergence, temperature):
    student, teacher, _ = make()
    actual = divergences(student, teacher, divergence, temperature=temperature, vocab_size=V, chunk_tokens=4)
    for n in range(N):
        q, p = (softmax([x / temperature for x in logits[n, :V].tolist()]) for logits in (student, teacher))
        assert float(actual.value[n]) == pytest.approx(by_hand(p, q, divergence), abs=2e-6, rel=2e-6)
        assert float(actual.kl[n]) == pytest.approx(kl(p, q), abs=2e-6, rel=2e-6)
        assert float(actual.entropy[n]) == pytest.approx(-sum(x * math.log(x) for x in p), abs=2e-6, rel=2e-6)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind} {d.beta}")
def test_gradients_are_autograds(divergence):
    """Of the sum over the vocabulary as it is written, in float64; in float32 within its rounding; and finite
    differences."""
    student, teacher, weights = make(torch.float64)
    x = student.clone().requires_grad_()
    logq, logp = (torch.log_softmax(z[:, :V] / 0.8, -1) for z in (x, teacher))
    (divergence.terms(logp, logq).sum(-1) * weights).sum().backward()
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        y = student.to(dtype, copy=True).requires_grad_()
        actual = divergences(y, teacher.to(dtype), divergence, temperature=0.8, vocab_size=V, chunk_tokens=2)
        (actual.value * weights.to(dtype)).sum().backward()
        torch.testing.assert_close(y.grad.double(), x.grad, atol=atol, rtol=0)
        assert (y.grad[:, V:] == 0).all() and not actual.kl.requires_grad

    def value(z):
        return divergences(z, teacher[:3], divergence, temperature=0.8, vocab_size=V).value

    assert torch.autograd.gradcheck(value, student[:3].clone().requires_grad_())


def test_the_ends_of_jsd_are_0_and_its_slopes_the_two_kls():
    """Which of the two distributions beta weighs: the first trap of every implementation."""
    student, teacher, _ = make(torch.float64, scale=1.0)
    value = {b: divergences(student, teacher, Divergence("jsd", b), vocab_size=V).value for b in (1e-6, 1 - 1e-6)}
    forward, reverse = (
        divergences(student, teacher, Divergence(kind), vocab_size=V).value for kind in ("forward_kl", "reverse_kl")
    )
    torch.testing.assert_close(value[1e-6] / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(value[1 - 1e-6] / 1e-6, reverse, rtol=1e-4, atol=0)
    assert (value[1e-6] < 1e-4).all() and (forward - reverse).abs().max() > 0.1
    halves = [divergences(a, b, Divergence("jsd"), vocab_size=V).value for a, b in ((student, teacher),) * 2]
    torch.testing.assert_close(*halves)  # symmetric at a half
    one, other = (
        divergences(a, b, Divergence("jsd", beta), vocab_size=V).value
        for a, b, beta in ((student, teacher, 0.2), (teacher, student, 0.8))
    )
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("divergence", KINDS[:4], ids=lambda d: d.kind)
def test_equal_models_have_no_divergence_and_no_gradient(divergence):
    student = make()[0].requires_grad_()
    actual = divergences(student, student.detach(), divergence, vocab_size=V).value
    actual.sum().backward()
    assert actual.abs().max() < 1e-6 and student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("divergence", KINDS[:4], ids=lambda d: d.kind)
def test_padding_and_impossible_tokens_are_harmless(divergence):
    """NaN in padding; minus infinity in both, as masked logits are."""
    student, teacher, _ = make()
    dirty = [logits.clone() for logits in (student, teacher)]
    for logits in dirty:
        logits[:, V:] = math.nan
        logits[:, V - 1] = -math.inf
    dirty[0].requires_grad_()
    clean = student.clone().requires_grad_()
    a = divergences(dirty[0], dirty[1], divergence, vocab_size=V).value
    b = divergences(clean, teacher, divergence, vocab_size=V - 1).value
    torch.testing.assert_close(a, b)
    a.sum().backward(), b.sum().backward()
    torch.testing.assert_close(dirty[0].grad[:, : V - 1], clean.grad[:, : V - 1])
    assert (dirty[0].grad[:, V - 1 :] == 0).all()


def test_bfloat16_is_computed_in_float32():
    student, teacher, _ = make(torch.bfloat16)
    x = student.clone().requires_grad_()
    actual = divergences(x, teacher, Divergence("reverse_kl"), vocab_size=V).value
    wanted = divergences(student.float(), teacher.float(), Divergence("reverse_kl"), vocab_size=V).value
    assert actual.dtype == torch.float32 and torch.equal(actual.detach(), wanted)
    actual.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.abs().max() > 0


# --- the k most likely tokens of the teacher


@pytest.mark.parametrize("k", [1, 3, V])
def test_the_most_likely_tokens(k):
    _, teacher, _ = make()
    dirty = teacher.clone()
    dirty[:, V:] = 1e9
    logprobs, ids = top_logprobs(dirty, k, temperature=0.7, vocab_size=V)
    wanted = torch.log_softmax(teacher[:, :V] / 0.7, -1).sort(-1, descending=True)
    torch.testing.assert_close(logprobs, wanted.values[:, :k])
    assert torch.equal(ids, wanted.indices[:, :k])


@pytest.mark.parametrize("chunk", [2, 4096])
def test_logprobs_of_several_tokens(chunk):
    student, teacher, _ = make(torch.float64)
    _, ids = top_logprobs(teacher, 3, vocab_size=V)
    weights = torch.rand(N, 3, generator=torch.Generator().manual_seed(1)).double()
    grads = []
    for ours in (False, True):
        x = student.clone().requires_grad_()
        whole = torch.log_softmax(x[:, :V] / 0.8, -1).gather(-1, ids)
        actual = logprobs_at(x, ids, temperature=0.8, vocab_size=V, chunk_tokens=chunk) if ours else whole
        torch.testing.assert_close(actual, whole)
        (actual * weights).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def top_k(student, teacher, k, outside, divergence):
    logp, ids = top_logprobs(teacher, k, vocab_size=V)
    return divergence.terms(*bucketed(logp, logprobs_at(student, ids, vocab_size=V), outside)).sum(-1)


@pytest.mark.parametrize("divergence", KINDS[:4], ids=lambda d: d.kind)
def test_all_tokens_are_the_whole_vocabulary(divergence):
    """Without a tail; and with one: of a last token that stands for itself."""
    student, teacher, _ = make(torch.float64, scale=1.0)
    whole = divergences(student, teacher, divergence, vocab_size=V).value
    torch.testing.assert_close(top_k(student, teacher, V, "renormalise", divergence), whole)
    torch.testing.assert_close(top_k(student, teacher, V - 1, "tail", divergence), whole)


@pytest.mark.parametrize("divergence", KINDS[:4], ids=lambda d: d.kind)
def test_the_tail_sees_mass_that_the_student_puts_elsewhere(divergence):
    """By hand; less than the whole (tokens are put together), more with k; renormalised, it sees nothing."""
    student, teacher, _ = make(torch.float64)
    whole, before = divergences(student, teacher, divergence, vocab_size=V).value, None
    for k in (2, 4, 7):
        actual = top_k(student, teacher, k, "tail", divergence)
        ids = top_logprobs(teacher, k, vocab_size=V)[1]
        for n in range(N):
            q, p = (softmax(logits[n, :V].tolist()) for logits in (student, teacher))
            tops = [[x[i] for i in ids[n].tolist()] for x in (p, q)]
            wanted = by_hand(*([*x, 1 - sum(x)] for x in tops), divergence)
            assert float(actual[n]) == pytest.approx(wanted, abs=1e-9)
        assert (actual <= whole + 1e-9).all() and (before is None or (actual >= before - 1e-9).all())
        before = actual
    elsewhere = teacher.clone()
    elsewhere.scatter_(1, teacher[:, :V].argmin(-1, keepdim=True), 30.0)
    assert top_k(elsewhere, teacher, 4, "renormalise", divergence).max() < 1e-9
    assert top_k(elsewhere, teacher, 4, "tail", divergence).min() > 0.05


@pytest.mark.parametrize("k", [1, 3, V])
def test_zero_is_a_kl_from_a_teacher_that_never_says_the_others(k):
    """Of the whole vocabulary, with the teacher's other probabilities 0: value and gradient; so never negative."""
    student, teacher, _ = make(torch.float64)
    ids = teacher[:, :V].topk(k, -1).indices
    nothing = torch.full_like(teacher[:, :V], -torch.inf)
    p = torch.softmax(nothing.scatter(1, ids, teacher.gather(1, ids)), -1)
    grads = []
    for ours in (True, False):
        x = student.clone().requires_grad_()
        if ours:
            value = top_k(x, teacher, k, "zero", Divergence("forward_kl"))
        else:
            value = torch.nn.functional.kl_div(torch.log_softmax(x[:, :V], -1), p, reduction="none").sum(-1)
        grads.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    torch.testing.assert_close(*grads)
    assert (grads[0][0] > 0).all()
    same = top_k(teacher, teacher, k, "zero", Divergence("forward_kl"))
    mass = torch.softmax(teacher[:, :V], -1).gather(1, ids).sum(-1)
    torch.testing.assert_close(same, -mass.log(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", KINDS[:4], ids=lambda d: d.kind)
def test_a_tail_of_nothing_is_finite(divergence):
    """Both models are sure, in float32: nothing is left for the tail but rounding."""
    teacher = torch.zeros(2, COLUMNS)
    teacher[:, 3] = 200.0
    student = torch.zeros(2, COLUMNS)
    student[0, 3], student[1, 4] = 200.0, 200.0
    student.requires_grad_()
    actual = top_k(student, teacher, 2, "tail", divergence)
    actual.sum().backward()
    assert actual.isfinite().all() and student.grad.isfinite().all()
    assert actual.detach()[0] < 1e-6 < actual.detach()[1]


def test_log1mexp_at_both_ends():
    x = torch.tensor([-1e-12, -1e-6, -0.1, -0.6931, -0.6932, -5.0, -40.0], dtype=torch.float64, requires_grad=True)
    actual = log1mexp(x)
    wanted = [math.log(-math.expm1(v)) if v > -0.6 else math.log1p(-math.exp(v)) for v in x.tolist()]
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64))
    actual.sum().backward()
    torch.testing.assert_close(x.grad, 1 / torch.expm1(-x.detach()) * -1)
