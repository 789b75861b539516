import pytest

from aligner.data.readers import read_rows
from aligner.errors import DataError
from examples import gym_tasks
from tests.needs import package

upstream = package("reasoning_gym")

TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def test_rows_are_unique_repeatable_and_score_themselves():
    rows = gym_tasks.generate("chain_sum", 500, 7, **TWO)
    assert rows == gym_tasks.generate("chain_sum", 500, 7, **TWO)
    assert len({row["prompt"] for row in rows}) == 500
    assert rows != gym_tasks.generate("chain_sum", 500, 8000, **TWO)
    scorer = upstream.create_dataset("chain_sum", size=1, seed=0)
    for row in rows[:20]:
        left, sign, right = row["prompt"].split(":")[1].split()[:3]
        assert int(row["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert scorer.score_answer(row["answer"], row["entry"]) == 1.0
        assert row["task"] == "chain_sum" and row["entry"]["metadata"]["num_terms"] == 2


def test_split_is_disjoint_across_seeds_and_sizes():
    fractions = {"train": 0.8, "validation": 0.1, "test": 0.1}
    one = gym_tasks.split(gym_tasks.generate("chain_sum", 3000, 0, **TWO), fractions)
    two = gym_tasks.split(gym_tasks.generate("chain_sum", 2000, 12345, **TWO), fractions)
    names = list(fractions)
    for a in names:
        for b in names:
            shared = {row["prompt"] for row in one[a]} & {row["prompt"] for row in two[b]}
            assert (len(shared) > 0) == (a == b)
    sizes = [len(one[name]) for name in names]
    assert sum(sizes) == 3000
    assert all(abs(n - 3000 * share) < 100 for n, share in zip(sizes, fractions.values(), strict=True))


@pytest.mark.parametrize("fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}])
def test_fractions_have_to_sum_to_one(fractions):
    with pytest.raises(DataError, match=r"sum to 1"):
        gym_tasks.split([], fractions)


def test_written_rows_read_back_the_same(tmp_path):
    rows = gym_tasks.generate("chain_sum", 20, 0)
    gym_tasks.write_jsonl(rows, str(tmp_path / "deep" / "x.jsonl"))
    assert list(read_rows(str(tmp_path / "deep" / "x.jsonl"))) == rows


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("chain_summ", {}, "'chain_summ': expected one of .*chain_sum"),
        ("chain_sum", {"colour": 3}, "expected other options.*colour"),
        ("chain_sum", {"min_terms": 0}, "expected other options.*positive"),
        ("chain_sum", {**TWO, "max_digits": 1, "min_digits": 1}, "expected 300 different questions, found"),
    ],
)
def test_unknown_tasks_and_options_are_refused(task, options, message):
    with pytest.raises(DataError, match=message):
        gym_tasks.generate(task, 300, 0, **options)


def test_a_task_whose_scorer_needs_tuples_is_refused_loudly():
    with pytest.raises(DataError, match=r"cannot be used from a file"):
        gym_tasks.generate("rearc", 2, 0)
