"""Schedules, seeds, minibatch membership: choices that no rank may influence."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.optim import OptimConfig
from aligner.errors import ConfigError
from aligner.ops.packing.minibatches import minibatch_rows
from aligner.ops.schedules import lr_at
from aligner.ops.seeds import derive, request_seed, request_seeds


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lr_by_hand(schedule):
    cfg = OptimConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup_steps=4, decay_from=0.5)
    got = [lr_at(s, cfg, 20) for s in range(25)]
    assert got[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert got[4:11] == [1.0] * 7
    if schedule == "constant":
        assert got[11:] == [1.0] * 14
        return
    middle = {"linear": 0.55, "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2}[schedule]
    quarter = {"linear": 1 - 0.9 * 0.2, "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2}[schedule]
    assert got[15] == pytest.approx(middle) and got[12] == pytest.approx(quarter)
    assert got[20:] == [0.1] * 5


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_fraction_of_warm_up_is_its_steps_rounded_up(schedule):
    cfg = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=0.12)
    for total, steps in ((0, 0), (8, 1), (100, 12), (101, 13)):
        assert [lr_at(s, cfg, total) for s in range(total)] == [
            lr_at(s, replace(cfg, warmup_steps=steps), total) for s in range(total)
        ]


@given(
    schedule=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 30),
    total=st.integers(1, 40),
    decay_from=st.floats(0, 1),
)
def test_lr_rises_then_falls_within_bounds(schedule, warmup, total, decay_from):
    cfg = OptimConfig(lr=2e-4, min_lr=1e-5, schedule=schedule, warmup_steps=warmup, decay_from=decay_from)
    values = [lr_at(s, cfg, total) for s in range(total + 3)]
    assert all(0 < v <= cfg.lr * (1 + 1e-12) for v in values)
    top = min(warmup, len(values))
    assert values[:top] == sorted(values[:top]) and values[top:] == sorted(values[top:], reverse=True)
    assert warmup > total or values[total] == pytest.approx(cfg.min_lr)


def test_seeds_are_stable_across_processes_and_versions():
    # a change of these numbers changes every recorded run
    code = "from aligner.ops.seeds import *; print(derive(0), derive(7, 'epoch', 3), request_seed(1, 2, 3, 4))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "9", "PYTHONPATH": ":".join(sys.path)},
    )
    want = [4774516902939907285, 549524065415015029, 5618832642613516457]
    assert [int(x) for x in out.stdout.split()] == want
    assert [derive(0), derive(7, "epoch", 3), request_seed(1, 2, 3, 4)] == want


def test_seeds_differ_in_every_word_and_fit_63_bits():
    seeds = {request_seed(s, r, p, i) for s in range(4) for r in range(4) for p in range(8) for i in range(8)}
    assert len(seeds) == 4 * 4 * 8 * 8 and all(0 <= s < 2**63 for s in seeds)
    assert any(s >= 2**62 for s in seeds)
    words = [(1, 23), (12, 3), (123,), ("1", 23), ("a", "b"), ("ab",), ("a", "1:b"), (-1,), (0,), ()]
    assert len({derive(0, *w) for w in words}) == len(words)
    torch.Generator().manual_seed(max(seeds))


@given(seed=st.integers(0, 2**63), rollout=st.integers(0, 10**6), ids=st.lists(st.integers(0, 10**12), max_size=5))
def test_vectorised_request_seeds(seed, rollout, ids):
    assert request_seeds(seed, rollout, ids, 3) == [[request_seed(seed, rollout, p, i) for i in range(3)] for p in ids]


def members(prompts, group, minibatches, seed, dp):
    """Global rows (slot, place) of each minibatch, when the prompts are cut over dp ranks."""
    out = [set() for _ in range(minibatches)]
    share = prompts // dp
    for rank in range(dp):
        slots = torch.arange(rank * share, (rank + 1) * share).repeat_interleave(group)
        parts = minibatch_rows(slots, group, minibatches, seed)
        assert [len(p) for p in parts] == [share * group // minibatches] * minibatches
        assert torch.cat(parts).sort().values.tolist() == list(range(share * group))
        for m, rows in enumerate(parts):
            assert rows.dtype == torch.int64
            out[m] |= {(int(slots[i]), int(i) % group) for i in rows}
    return out


@settings(max_examples=120, deadline=None)
@given(
    group=st.integers(1, 12),
    minibatches=st.integers(1, 12),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_minibatch_has_the_same_members_on_1_2_and_4_ranks(group, minibatches, blocks, seed):
    least = minibatches // math.gcd(minibatches, group)  # prompts of a rank whose rows divide
    prompts = 4 * least * blocks
    one = members(prompts, group, minibatches, seed, 1)
    assert one == members(prompts, group, minibatches, seed, 2) == members(prompts, group, minibatches, seed, 4)


@pytest.mark.parametrize(("group", "minibatches"), [(1, 4), (2, 4), (4, 4), (8, 4), (4, 6)])
def test_epochs_shuffle(group, minibatches):
    a, b = (members(24, group, minibatches, derive(0, "epoch", e), 1) for e in (0, 1))
    assert a != b and a == members(24, group, minibatches, derive(0, "epoch", 0), 1)


def test_blocks_are_shuffled_independently_and_uniformly():
    counts = torch.zeros(4)
    for seed in range(400):
        for m, rows in enumerate(minibatch_rows(torch.arange(4), 1, 4, seed)):
            counts[m] += int(rows[0]) == 2
    assert (counts - 100).abs().max() < 40
    ways = {tuple(p[i].item() % 4 for p in minibatch_rows(torch.arange(64), 1, 4, 3)) for i in range(16)}
    assert len(ways) > 4


def test_a_group_that_divides_is_spread_evenly_over_minibatches():
    for rows in minibatch_rows(torch.arange(5).repeat_interleave(8), 8, 4, 1):
        assert torch.bincount(rows // 8).tolist() == [2] * 5


def test_rows_in_another_order_keep_their_place_in_the_group():
    slots = torch.tensor([1, 0, 1, 0])
    tidy = members(2, 2, 2, 9, 1)
    position = [0, 0, 1, 1]
    got = [{(int(slots[i]), position[i]) for i in rows} for rows in minibatch_rows(slots, 2, 2, 9)]
    assert got == tidy


@pytest.mark.parametrize(("prompts", "group", "minibatches"), [(3, 4, 5), (3, 2, 4), (5, 1, 2), (1, 4, 8)])
def test_an_uneven_split_names_the_key(prompts, group, minibatches):
    with pytest.raises(ConfigError, match=r"batch\.minibatch_samples") as error:
        minibatch_rows(torch.arange(prompts).repeat_interleave(group), group, minibatches, 0)
    assert f"{minibatches} equal minibatches" in str(error.value)


def test_a_misaligned_slice_is_refused_rather_than_unequal():
    slots = torch.arange(1, 3).repeat_interleave(2)  # prompts 1 and 2 share no whole block of two
    uneven = 0
    for seed in range(20):
        try:
            minibatch_rows(slots, 2, 4, seed)
        except ConfigError:
            uneven += 1
    assert uneven > 0


def test_an_incomplete_group_is_refused():
    with pytest.raises(AssertionError, match="group=2"):
        minibatch_rows(torch.tensor([0, 0, 1]), 2, 1, 0)
