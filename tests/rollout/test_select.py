"""Which samples become rows of which file."""

from aligner.config.stages.sample import SampleConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.rollout.select import best, files, labels, pairs


def group(*samples, **columns):
    """(text, reward, finished) each."""
    names = ("completion", "reward", "finished")
    return [
        {"prompt": "p", "row": 3, "sample": i} | columns | dict(zip(names, s, strict=True))
        for i, s in enumerate(samples)
    ]


MIXED = group(
    ("bad", -1.0, True),
    ("good", 2.0, True),
    ("cut", 9.0, False),
    (" ", 8.0, True),
    ("good", 2.0, True),
    ("late", None, True),
    ("fine", 2.0, True),
    ("so-so", 0.5, True),
)


def texts(rows):
    return [row["completion"] for row in rows]


def test_the_best_are_different_whole_answers_with_a_reward():
    assert texts(best(MIXED, SampleConfig())) == ["good"]
    assert texts(best(MIXED, SampleConfig(best=0))) == ["good", "fine", "so-so", "bad"]
    assert texts(best(MIXED, SampleConfig(best=0, reward_above=0.5))) == ["good", "fine"]
    assert texts(best(MIXED, SampleConfig(best=2, unfinished=True))) == ["cut", "good"]
    assert best(MIXED, SampleConfig(reward_above=2.0)) == [] == best([], SampleConfig())


def test_a_pair_is_of_the_best_and_the_worst():
    (pair,) = pairs(MIXED, SampleConfig())
    assert pair == {
        "prompt": "p",
        "row": 3,
        "chosen": "good",
        "rejected": "bad",
        "margin": 3.0,
        "chosen_reward": 2.0,
        "rejected_reward": -1.0,
    }
    assert pairs(MIXED, SampleConfig(margin_above=3.0)) == [] != pairs(MIXED, SampleConfig(margin_above=2.9))
    assert pairs(group(("a", 1.0, True), ("b", 1.0, True)), SampleConfig()) == []  # a tie


def test_a_rows_own_answer_stands_against_each_different_sample():
    own = group(
        ("5", 0.0, True), ("7 ", 0.0, True), ("5", 0.0, True), ("6", None, True), ("8", 1.0, False), reference="7"
    )
    chosen = pairs(own, SampleConfig(pairs="answers"))
    assert [(row["chosen"], row["rejected"]) for row in chosen] == [("7", "5"), ("7", "6")]
    turns = [{"role": "assistant", "content": "5"}]
    chosen = pairs(group(("5", None, True), ("6", None, True), reference=turns), SampleConfig(pairs="answers"))
    assert [(row["chosen"], row["rejected"]) for row in chosen] == [(turns, "6")]


def test_labels_need_a_threshold():
    cfg = SampleConfig(reward_above=0.5)
    chosen = {row["completion"]: row["label"] for row in labels(MIXED, cfg)}
    assert chosen == {"good": True, "fine": True, "so-so": False, "bad": False}
    assert set(files(cfg, True)) == {"best.jsonl", "pairs.jsonl", "labels.jsonl"}
    assert set(files(SampleConfig(), True)) == {"best.jsonl", "pairs.jsonl"}
    assert set(files(SampleConfig(), False)) == set() != set(files(SampleConfig(pairs="answers"), False))


SAMPLE = st.tuples(st.sampled_from(["a", "b", "c", ""]), st.sampled_from([None, 0.0, 0.5, 1.0]), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(SAMPLE, max_size=6), st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.5]))
def test_what_holds_for_any_group(samples, keep, above):
    """Against a slow account of the same."""
    cfg, rows = SampleConfig(best=keep, reward_above=above), group(*samples)
    known: dict[str, list[float]] = {}
    for text, reward, finished in samples:
        if text and finished and reward is not None:
            known.setdefault(text, []).append(reward)
    chosen = best(rows, cfg)
    good = {text: max(values) for text, values in known.items() if max(values) > above}
    assert len(chosen) == (min(keep, len(good)) if keep else len(good))
    assert [row["reward"] for row in chosen] == sorted(good.values(), reverse=True)[: len(chosen)]
    assert all(row["reward"] == good[row["completion"]] for row in chosen)
    for pair in pairs(rows, cfg):
        assert pair["chosen"] != pair["rejected"] and pair["margin"] > 0
        assert pair["chosen_reward"] == max(max(values) for values in known.values())
        assert pair["rejected_reward"] == min(max(values) for values in known.values())
