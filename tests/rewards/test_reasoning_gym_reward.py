"""The reasoning-gym reward against the tasks' own objects."""

from __future__ import annotations

import json

import pytest

from aligner.errors import RewardError
from aligner.rewards.reasoning_gym import reasoning_gym
from aligner.types import Prompt, Sample
from tests.needs import package

rg = package("reasoning_gym")


def sample(response: str, entry) -> Sample:
    return Sample(Prompt(0, (1,), "", {"entry": entry}), 0, response, (1,), True)


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown", "spell_backward", "simple_equations"])
def test_scores_are_the_tasks_own(task):
    data = rg.create_dataset(task, size=4, seed=3)
    for entry in data:
        answers = [entry["answer"], "17", f"it is {entry['answer']}", ""]
        expected = [data.score_answer(answer, entry) for answer in answers]
        stored = json.loads(json.dumps(entry))  # as a JSONL row comes back
        assert reasoning_gym([sample(a, stored) for a in answers]) == expected
        assert reasoning_gym([sample(a, json.dumps(entry)) for a in answers], task=task) == expected
        assert expected[0] == 1.0


def test_tag_takes_only_the_tagged_answer():
    entry = rg.create_dataset("chain_sum", size=1, seed=0)[0]
    rows = [sample(f"thinking <answer> {entry['answer']} </answer>", entry), sample(entry["answer"], entry)]
    assert reasoning_gym(rows, tag="answer") == [1.0, 0.0]


def test_unknown_task_and_entry_without_task():
    with pytest.raises(RewardError, match=r"args.task='chain_some'"):
        reasoning_gym([sample("1", {"answer": "1"})], task="chain_some")
    with pytest.raises(RewardError, match=r"args.task=None"):
        reasoning_gym([sample("1", {"answer": "1"})])
    assert reasoning_gym([sample("1", None)]) == [None]
