"""Entries of several tokens, against loops."""

import pytest
import torch

from aligner.ops.kernels.entries import entries_seen, pooled, tokens_seen


def by_loops(kv, gate, bias, twice):
    """Each number by itself."""
    m, d = len(bias), kv.shape[2] // (1 + twice)
    out = torch.zeros(len(kv), kv.shape[1] // m, d)
    for row in range(len(kv)):
        for entry in range(out.shape[1]):
            for i in range(d):
                of = [(entry * m + j, j, i + d * twice) for j in range(m)]
                of += [((entry - 1) * m + j, j, i) for j in range(m) if twice and entry]
                weights = torch.stack([gate[row, token, at] + bias[j, at] for token, j, at in of]).softmax(0)
                out[row, entry, i] = sum(w * kv[row, token, at] for w, (token, _, at) in zip(weights, of, strict=True))
    return out


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("length, m", [(11, 3), (8, 4), (5, 1), (2, 3)])
def test_entries_are_weighted_sums(length, m, twice):
    g = torch.Generator().manual_seed(length)
    kv, gate = (torch.randn(2, length, 4 * (1 + twice), generator=g) for _ in range(2))
    bias = torch.randn(m, 4 * (1 + twice), generator=g)
    torch.testing.assert_close(pooled(kv, gate, bias, twice), by_loops(kv, gate, bias, twice))


def test_a_query_sees_what_ends_up_to_its_own_token():
    positions = torch.arange(9)
    assert entries_seen(positions, 4, 3).sum(1).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    near = tokens_seen(positions, 9, 4)
    assert all(near[p].nonzero().flatten().tolist() == list(range(max(0, p - 3), p + 1)) for p in range(9))
