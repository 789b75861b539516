"""Everything in ops that reduces over a group, on two gloo ranks, run once for all tests of this file."""

import pytest
import torch
import torch.distributed as dist

from aligner.ops.kernels.divergence import Divergence, divergences
from aligner.ops.kernels.top import bucketed, logprobs_at, top_logprobs
from aligner.ops.rl.advantages import gdpo, gpg
from aligner.ops.rl.aggregate import AGGREGATIONS, aggregate, denominator
from aligner.ops.rl.covariance import choose_random, choose_top, covariance, token_keys
from aligner.ops.rl.mismatch import mismatch_sums
from aligner.ops.rl.token_advantages import whiten
from aligner.ops.rl.value_loss import explained_variance, explained_variance_sums
from tests.ops.kernels.test_logprobs import token_logprobs

WIDTH = 6  # columns per rank
# padding columns on the last rank; none; a last rank that is nothing but padding
VOCABS = (10, 12, 6)
DTYPES = (torch.float32, torch.bfloat16)


def logits_case(vocab, dtype):
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(3, 5, 2 * WIDTH, generator=g) * 4).to(dtype)
    tokens = torch.randint(vocab, (3, 5), generator=g)
    return logits, tokens, torch.randn(3, 5, generator=g), torch.randn(3, 5, generator=g)


def divergence_case(vocab, group=None):
    """{name: (values, gradient of the student's logits)} of all columns, or of a rank's."""
    rank, results = (0, {}) if group is None else (dist.get_rank(group), {})
    student, teacher = (logits_case(vocab, torch.float32)[0][n] for n in (0, 1))
    own = slice(None) if group is None else slice(rank * WIDTH, (rank + 1) * WIDTH)
    where, k = {"temperature": 0.8, "vocab_size": vocab, "group": group}, 3
    logp, ids = top_logprobs(teacher[:, own], k, **where)
    for name in ("forward_kl", "reverse_kl", "jsd", "top"):
        x = student[:, own].clone().requires_grad_()
        if name == "top":
            values = Divergence("mixed", 0.4).terms(*bucketed(logp, logprobs_at(x, ids, **where), "tail")).sum(-1)
        else:
            values = divergences(x, teacher[:, own], Divergence(name, 0.3), **where, chunk_tokens=2)
            values = values.value + 0 * (values.kl + values.entropy)
        (values * torch.arange(1.0, 6.0)).sum().backward()
        results[name] = (values.detach(), x.grad)
    return results | {"ids": (ids, torch.zeros(5, 0)), "logp": (logp, torch.zeros(5, 0))}


def rows_case():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(6, 8, generator=g) * 3 + 2
    mask = (torch.rand(6, 8, generator=g) < 0.6).float()
    mask[1] = 0
    return x, mask, torch.randn(6, 8, generator=g)


def groups_case():
    """Scores of 8 groups of 4, of which 3 are degenerate; two components, some not applicable; some invalid."""
    g = torch.Generator().manual_seed(6)
    scores = torch.randint(3, (32,), generator=g).float()
    scores[4:16] = 1.0
    components = torch.stack([scores, torch.rand(32, generator=g)], 1).double()
    components[torch.rand(32, generator=g) < 0.2, 1] = torch.nan
    return scores, components, torch.arange(8).repeat_interleave(4), torch.rand(32, generator=g) < 0.9


def chosen_case(rows=slice(None), group=None):
    """{name: chosen tokens} of these rows of a minibatch."""
    x, mask, other = rows_case()
    keys = token_keys(torch.arange(6)[rows], 8)
    cov = covariance(x[rows], other[rows], mask[rows], group)
    return {
        "cov": cov,
        "some": choose_random(cov, mask[rows], keys, 0.2, -1.0, 1.0, group),
        "all": choose_random(cov, mask[rows], keys, 1.0, 0.0, 1.0, group),
        "one": choose_random(cov, mask[rows], keys, 1e-9, -9.0, 9.0, group),
        "top": choose_top(cov, mask[rows], keys, 0.2, group),
        "tied": choose_top(torch.zeros_like(cov), mask[rows], keys, 0.3, group),
    }


def on_rank():
    """The job of each of the two ranks."""
    group = dist.group.WORLD
    rank = dist.get_rank(group)
    out = {}
    for vocab in VOCABS:
        for dtype in DTYPES:
            for entropy in (False, True):
                logits, tokens, wl, we = logits_case(vocab, dtype)
                own = logits[..., rank * WIDTH : (rank + 1) * WIDTH].clone()
                if rank:
                    own[..., vocab - WIDTH :] = torch.nan  # padding must have no say
                own.requires_grad_()
                lp, h = token_logprobs(
                    own, tokens, temperature=0.8, vocab_size=vocab, group=group, chunk_tokens=7, entropy=entropy
                )
                ((lp * wl).sum() + ((h * we).sum() if entropy else 0)).backward()
                out["logprobs", vocab, dtype, entropy] = (lp.detach(), None if h is None else h.detach(), own.grad)
    for vocab in VOCABS:
        out["divergence", vocab] = divergence_case(vocab, group)
    x, mask, other = rows_case()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)  # unequal shares
    for shift in (True, False):
        for ddof in (0, 1):
            out["whiten", shift, ddof] = whiten(x[rows], mask[rows], group, shift, ddof)
    scores, components, number, valid = groups_case()
    own = slice(0, 8) if rank == 0 else slice(8, 32)
    out["gpg"] = gpg(scores[own], number[own], valid[own], group)
    out["gdpo"] = gdpo(components[own], [1.0, 0.5], number[own], valid[own], ranks=group)
    out["chosen"] = chosen_case(rows, group)
    for kind in AGGREGATIONS:
        total = denominator(mask[rows], kind, 50, group)
        parts = [aggregate(x[rows][i : i + 1], mask[rows][i : i + 1], kind, total) for i in range(len(x[rows]))]
        out["aggregate", kind] = sum(parts)
    sums = explained_variance_sums(x[rows], other[rows], mask[rows])
    out["explained_variance"] = sums
    out["mismatch"] = mismatch_sums(x[rows], other[rows], mask[rows])
    return out


pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def pair(ranks):
    return ranks.run("tests.ops.kernels.test_two_ranks:on_rank", world=2)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
def test_vocabulary_shards_equal_float64_log_softmax(pair, vocab, dtype, entropy):
    logits, tokens, wl, we = logits_case(vocab, dtype)
    exact = logits.double().requires_grad_()
    logp = torch.log_softmax(exact[:, :-1, :vocab] / 0.8, -1)
    lp = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    h = -(logp.exp() * logp).sum(-1)
    ((lp * wl[:, 1:]).sum() + ((h * we[:, 1:]).sum() if entropy else 0)).backward()
    got = [rank["logprobs", vocab, dtype, entropy] for rank in pair]
    for ours, ours_h, _ in got:
        torch.testing.assert_close(ours[:, 1:].double(), lp.detach(), atol=5e-6, rtol=1e-6)
        assert (ours[:, 0] == 0).all()
        if entropy:
            torch.testing.assert_close(ours_h[:, 1:].double(), h.detach(), atol=5e-6, rtol=1e-6)
    assert torch.equal(got[0][0], got[1][0])
    grad = torch.cat([g for _, _, g in got], -1)
    assert grad.dtype == dtype and (grad[..., vocab:] == 0).all()
    loose = {"atol": 5e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 1e-2}
    torch.testing.assert_close(grad.double(), exact.grad, **loose)


@pytest.mark.parametrize("vocab", VOCABS)
def test_divergences_over_vocabulary_shards_are_those_of_whole_rows(pair, vocab):
    whole = divergence_case(vocab)
    for name, (values, grad) in whole.items():
        results = [rank["divergence", vocab][name] for rank in pair]
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][0], values, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(torch.cat([g for _, g in results], -1), grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_uses_the_tokens_of_all_ranks(pair, shift, ddof):
    x, mask, _ = rows_case()
    chosen = x[mask.bool()].double()
    want = (x.double() - chosen.mean()) / (chosen.var(correction=ddof) + 1e-8).sqrt()
    want = torch.where(mask.bool(), want if shift else want + chosen.mean(), 0.0)
    got = torch.cat([rank["whiten", shift, ddof] for rank in pair])
    torch.testing.assert_close(got, want.float())


def test_advantages_use_the_groups_of_all_ranks(pair):
    scores, components, group, valid = groups_case()
    whole = gpg(scores, group, valid), gdpo(components, [1.0, 0.5], group, valid)
    for name, want in zip(("gpg", "gdpo"), whole, strict=True):
        assert want.abs().max() > 0.5
        torch.testing.assert_close(torch.cat([rank[name] for rank in pair]), want)


def test_tokens_are_chosen_among_those_of_all_ranks(pair):
    whole = chosen_case()
    for name, want in whole.items():
        got = torch.cat([rank["chosen"][name] for rank in pair])
        torch.testing.assert_close(got, want, atol=1e-12 if name == "cov" else 0, rtol=0)
    tokens = int(rows_case()[1].sum())
    assert {name: int(x.sum()) for name, x in whole.items() if name not in ("cov", "all")} == {
        "some": int(0.2 * tokens),
        "one": 1,
        "top": int(0.2 * tokens),
        "tied": int(0.3 * tokens),
    }


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_micro_batches_and_ranks_add_up_to_the_minibatch(pair, kind):
    x, mask, _ = rows_case()
    whole = aggregate(x, mask, kind, denominator(mask, kind, 50))
    torch.testing.assert_close(pair[0]["aggregate", kind] + pair[1]["aggregate", kind], whole)


def test_sums_for_metrics_add_over_ranks(pair):
    x, mask, other = rows_case()
    sums = pair[0]["explained_variance"] + pair[1]["explained_variance"]
    assert explained_variance(sums) == pytest.approx(explained_variance(explained_variance_sums(x, other, mask)))
    means, maxima = mismatch_sums(x, other, mask)
    for name, (top, bottom) in means.items():
        parts = [rank["mismatch"][0][name] for rank in pair]
        assert float(sum(p[0] for p in parts) / sum(p[1] for p in parts)) == pytest.approx(float(top / bottom))
    for name, value in maxima.items():
        assert max(float(rank["mismatch"][1][name]) for rank in pair) == float(value)
