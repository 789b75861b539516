"""Environments of verifiers as their authors write them: several turns, and tools."""

import verifiers as vf
from datasets import Dataset


def rows():
    return Dataset.from_list([{"question": "q", "answer": "7", "info": {"low": 1}}])


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "higher" if int(messages[-1].content) < int(state["answer"]) else "lower"}]

    @vf.stop
    async def right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def right_at_last(completion, answer):
    return 1.0 if completion[-1].content == answer else 0.25


def guess(max_turns=5):
    return Guess(dataset=rows(), rubric=vf.Rubric(funcs=[right_at_last]), max_turns=max_turns)


def sums():
    return vf.ToolEnv(tools=[add], dataset=rows(), rubric=vf.Rubric(funcs=[right_at_last]))
