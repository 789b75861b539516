import random
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from examples.pairs import PAIRS, SAMPLES, change_digit, make_pairs

numbers = st.integers(-198, 198).map(str)


@given(numbers, st.integers(0, 99))
def test_one_digit_differs(answer, seed):
    changed = change_digit(answer, random.Random(seed))
    assert len(changed) == len(answer) and sum(a != b for a, b in zip(answer, changed, strict=True)) == 1
    assert changed.lstrip("-").isdigit() and (changed.lstrip("-")[0] != "0" or len(changed.lstrip("-")) == 1)


class Model:
    """Gives `answers` to every prompt."""

    def __init__(self, answers):
        self.answers = answers

    def tokenizer(self, texts, add_special_tokens):
        return SimpleNamespace(input_ids=[[1]] * len(texts))

    def answer(self, prompts, samples, sampling, seed):
        return [SimpleNamespace(response=f" {answer}") for _ in prompts for answer in self.answers[:samples]]


@given(st.lists(numbers, min_size=SAMPLES, max_size=SAMPLES), st.lists(numbers, min_size=1, max_size=5))
def test_rejected_are_wrong_and_different_and_the_models_own_where_it_errs(given_answers, right):
    rows = [{"prompt": f"question {i}", "answer": answer} for i, answer in enumerate(right)]
    pairs = make_pairs(Model(given_answers), rows, 6, 0)
    assert len(pairs) == PAIRS * len(rows)
    for row in rows:
        own = [pair for pair in pairs if pair["prompt"] == row["prompt"]]
        rejected = {pair["rejected"] for pair in own}
        assert {pair["chosen"] for pair in own} == {row["answer"]} and len(rejected) == PAIRS
        assert rejected >= set(given_answers) - {row["answer"]} and row["answer"] not in rejected
