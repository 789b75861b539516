"""The quick start's questions and their score, against the task that they are drawn like."""

from __future__ import annotations

from aligner.types import Prompt, Sample
from examples.sums import questions, score
from tests.needs import package

TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
RESPONSES = ["7", "-7", "07", " 7", "+7", "17", "7 apples", "7.", "", "-", "1 7", "7\n", "--7", "-70"]


def sample(response: str, answer: str) -> Sample:
    return Sample(Prompt(0, (1,), "", {"answer": answer}), 0, response, (1,), True)


def test_every_question_is_there_once_with_its_answer():
    rows = questions(16_200, seed=3)
    assert len({row["prompt"] for row in rows}) == 16_200
    for row in rows:
        first, sign, second = row["prompt"].removesuffix(" =").split(": ")[1].split()
        assert int(row["answer"]) == (int(first) + int(second) if sign == "+" else int(first) - int(second))


def test_rows_and_scores_are_those_of_chain_sum():
    package("reasoning_gym")
    from aligner.rewards.reasoning_gym import reasoning_gym
    from examples.gym_tasks import generate

    upstream = generate("chain_sum", 300, 5, **TWO)
    assert questions(300, 5) == [{"prompt": row["prompt"], "answer": row["answer"]} for row in upstream]
    for row in upstream[:3]:
        entry, answer = row["entry"], row["answer"]
        responses = [
            *RESPONSES,
            answer,
            f"0{answer}",
            f"{answer}1",
            f"{answer}.",
            f"{answer}.0",
            f"= {answer}",
            answer[1:],
        ]
        entries = [Sample(Prompt(0, (1,), "", {"entry": entry}), 0, text, (1,), True) for text in responses]
        assert score([sample(text, answer) for text in responses]) == reasoning_gym(entries)


def test_only_the_number_scores_in_full():
    right, wrong = ["-28", " -28", "-028"], ["28", "-2", "-281", "", "x"]
    assert score([sample(text, "-28") for text in right]) == [1.0] * 3
    assert max(score([sample(text, "-28") for text in wrong])) < 1
