"""Measures of several answers, against every subset and every order of ties."""

from itertools import combinations
from statistics import mean

import pytest

from aligner.ops.votes import majority, pass_at


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        rights = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            assert pass_at(k, samples, correct) == pytest.approx(mean(map(any, combinations(rights, k))))


@pytest.mark.parametrize(
    ("answers", "correct", "score"),
    [
        ("aab", (True, True, False), 1),
        ("abb", (True, False, False), 0),
        ("abc", (True, False, False), 1 / 3),
        ("aabbc", (True, True, False, False, False), 1 / 2),
        ("aaa", (True, True, False), 2 / 3),  # a judge that is not sure
    ],
)
def test_a_majority_is_right_as_its_answer_is(answers, correct, score):
    assert majority(answers, correct) == pytest.approx(score)
