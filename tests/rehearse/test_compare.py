"""Which ranks are rehearsed, and whether they would wait for each other."""

import pytest

from aligner.config.resolve import compose
from aligner.errors import ConfigError
from aligner.rehearse.compare import circle, mismatches
from aligner.rehearse.ranks import chosen, source_of, stage_of


@pytest.fixture
def cfg():
    return compose(["model=tiny", "parallel.tensor=2", "parallel.pipeline=4", "parallel.context=2"])


def test_stages_has_one_rank_of_each_and_they_are_one_pipeline(cfg):
    actual = chosen("stages", cfg, 64)
    assert sorted(actual) == [0, 16, 32, 48]
    assert sorted(stage_of(rank, cfg, 64) for rank in actual) == [0, 1, 2, 3]


def test_who_is_listened_to_comes_first(cfg):
    assert chosen("3,17", cfg, 64) == [49, 51, 3, 17]
    for which in ("stages", "all-distinct"):
        actual = chosen(which, cfg, 64)
        peers = [source_of(rank, cfg, 64) for rank in actual]
        assert all(actual.index(peer) <= index for index, peer in enumerate(peers))


def test_all_distinct_has_the_first_and_the_last_of_every_group(cfg):
    actual = chosen("all-distinct", cfg, 64)
    assert len(actual) == 4 * 2 * 2 * 2
    assert {0, 1, 2, 3, 12, 15, 63} <= set(actual)


def test_ranks_that_only_generate_come_after_rank_0(cfg):
    cfg.engine.ranks = 16
    assert chosen("stages", cfg, 80) == [48, 0, 16, 32, 64]
    assert chosen("all-distinct", cfg, 80)[-2:] == [64, 79]
    assert chosen("70", cfg, 80) == [48, 0, 70]
    assert [stage_of(rank, cfg, 80) for rank in (0, 63, 64, 79)] == [0, 3, None, None]


@pytest.mark.parametrize("which", ["64", "first", "1,", "-1"])
def test_a_rank_that_is_not_there(cfg, which):
    with pytest.raises(ConfigError, match="--ranks"):
        chosen(which, cfg, 64)


def record(calls, errors=(), whole=True):
    return {
        "errors": list(errors),
        "whole": whole,
        "groups": {"pp": [0, 4]},
        "sequences": {"pp": [[what, f"at {what}", i, i] for i, what in enumerate(calls)]},
    }


def test_equal_sequences_are_no_mismatch():
    assert mismatches({0: record("ab"), 4: record("ab")}) == []


def test_the_first_difference_is_named_with_both_sides():
    (mismatch,) = mismatches({0: record("axb"), 4: record("ayb")})
    assert (mismatch["group"], mismatch["number"]) == ("pp", 1)
    assert [(side["rank"], side["call"], side["stack"]) for side in mismatch["calls"]] == [
        (0, "x", "at x"),
        (4, "y", "at y"),
    ]


def test_of_a_rank_that_calls_no_more_the_last_call_is_named():
    (mismatch,) = mismatches({0: record("ab"), 4: record("abc")})
    silent = mismatch["calls"][0]
    assert mismatch["number"] == 2 and (silent["call"], silent["stack"]) == ("no further call", "after at b")


def test_a_rank_that_never_calls_is_a_mismatch():
    silent = record("")
    silent["sequences"] = {}
    (mismatch,) = mismatches({0: record("a"), 4: silent})
    assert mismatch["calls"][1]["call"] == "no further call"


def test_a_rank_that_failed_is_not_compared():
    assert mismatches({0: record("ab"), 4: record("a", errors=["out of memory"])}) == []
    assert mismatches({0: record("ab"), 4: record("a", whole=False)}) == []


def in_order(*calls, ranks, errors=()):
    """A rank's record, of calls ("x", waits at once) and waits ("x!") in this order; `ranks`: of each group."""
    sequences = {}
    for moment, call in enumerate(calls):
        if call.endswith("!"):
            sequences[call[0]][-1][-1] = moment
        else:
            sequences.setdefault(call[0], []).append([call, f"at {call}", moment, None if call[1:] else moment])
    groups = {key: members for key, members in ranks.items() if key in sequences}
    return {"errors": list(errors), "whole": True, "groups": groups, "sequences": sequences}


TWO = {"a": [0, 1], "b": [0, 1]}
FOUR = {"a": [0, 1], "b": [1, 3], "c": [2, 3], "d": [0, 2]}


def test_two_groups_in_one_order_are_no_circle():
    assert circle({rank: in_order("a", "b", "a", ranks=TWO) for rank in (0, 1)}) == []


def test_two_groups_in_two_orders_are_a_circle_with_both_stacks():
    calls = circle({0: in_order("b", "a", "b", ranks=TWO), 1: in_order("b", "b", "a", ranks=TWO)})
    assert [(call["rank"], call["call"], call["stack"]) for call in calls] == [
        (0, "a, call 1: a", "at a"),
        (1, "b, call 2: b", "at b"),
    ]


def test_a_circle_of_four_groups_of_two():
    orders = {0: ("a", "d"), 1: ("b", "a"), 2: ("d", "c"), 3: ("c", "b")}
    records = {rank: in_order(*order, ranks=FOUR) for rank, order in orders.items()}
    assert [call["rank"] for call in circle(records)] == [0, 1, 3, 2]
    records[3] = in_order("b", "c", ranks=FOUR)
    assert circle(records) == []


def test_calls_without_a_wait_block_nobody():
    records = {0: in_order("ax", "b", "a!", ranks=TWO), 1: in_order("bx", "a", "b!", ranks=TWO)}
    assert circle(records) == []
    records[0] = in_order("ax", "a!", "b", ranks=TWO)
    records[1] = in_order("b", "ax", "a!", ranks=TWO)
    assert mismatches(records) == [] and len(circle(records)) == 2


def test_ranks_that_were_not_rehearsed_or_failed_come_in_time():
    assert circle({0: in_order("a", "b", ranks=TWO)}) == []
    assert circle({0: in_order("a", "b", ranks=TWO), 1: in_order("b", "a", ranks=TWO, errors=["x"])}) == []


def test_groups_whose_own_calls_differ_are_left_to_the_mismatch():
    records = {0: in_order("a", "b", ranks=TWO), 1: in_order("b", "a", "a", ranks=TWO)}
    assert [mismatch["group"] for mismatch in mismatches(records)] == ["a"] and circle(records) == []
