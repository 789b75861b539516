"""Loading reward functions, and what is refused: not importable, raising, wrong length, no number."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.errors import RewardError
from aligner.rewards.base import check_scores
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import FunctionReward, load_function
from aligner.types import Prompt, Sample

ASSETS = Path(__file__).parents[1] / "assets"


def samples(*responses: str, **fields) -> list[Sample]:
    return [
        Sample(Prompt(10 + i, (1,), f"prompt {i}", fields), i, text, tuple(range(len(text))), True)
        for i, text in enumerate(responses)
    ]


def reward(function, **args) -> FunctionReward:
    return FunctionReward(function, "mine", args, "reward.functions[3]")


def test_a_file_function_with_args(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def count(samples, letter):\n    return [s.response.count(letter) for s in samples]\n")
    loaded = load_function(RewardFunctionConfig(path=f"{file}:count", args={"letter": "a"}))
    assert loaded.name == "count"
    assert loaded(samples("banana", "x")) == [3.0, 0.0]


def test_the_two_byte_asset_gives_credit_per_byte():
    loaded = load_function(RewardFunctionConfig(path=f"{ASSETS / 'two_bytes.py'}:two_bytes", name="trap"))
    assert loaded.name == "trap"
    assert loaded(samples("Qz", "Qz!", "Qa", "az", "ab", "")) == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0]


def test_a_function_of_a_module_is_loaded():
    loaded = load_function(RewardFunctionConfig(path="aligner.rewards.verifiable:exact_match"))
    assert loaded(samples("5", "6", answer="5")) == [1.0, 0.0]


def test_the_signature_with_completions_gets_columns():
    def f(prompts, completions, answer, completion_ids, scale):
        assert prompts == ["prompt 0", "prompt 1"]
        assert [len(ids) for ids in completion_ids] == [1, 2]
        return [scale * (c == a) for c, a in zip(completions, answer, strict=True)]

    assert reward(f, scale=2.0)(samples("7", "77", answer="7", unused=1)) == [2.0, 0.0]


def test_of_conversations_it_gets_messages():
    (sample,) = samples("a")
    sample = replace(sample, prompt=replace(sample.prompt, messages=({"role": "user", "content": "q"},)))

    def f(prompts, completions):
        assert prompts == [[{"role": "user", "content": "q"}]]
        return [float(c[0]["content"] == "a" and c[0]["role"] == "assistant") for c in completions]

    assert reward(f)([sample]) == [1.0]


def test_keywords_get_all_columns_and_absent_ones_are_none():
    def f(completions, **columns):
        return columns["answer"]

    rows = samples("a", "b")
    rows[0].prompt.fields["answer"] = 4
    rows[1] = Sample(Prompt(1, (1,), "", {}), 0, "b", (1,), True)
    assert reward(f)(rows) == [4.0, None]


async def waits(prompts, completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


class Waits:
    async def __call__(self, samples):
        return await asyncio.gather(*(self.one(s) for s in samples))

    async def one(self, sample):
        await asyncio.sleep(0)
        return float(len(sample.response))


def test_asynchronous_functions_are_awaited():
    assert reward(waits)(samples("7", "8", answer="7")) == [1.0, 0.0]
    assert reward(Waits())(samples("7", "88")) == [1.0, 2.0]


def test_an_asynchronous_function_that_raises_names_the_sample():
    async def f(samples):
        await asyncio.sleep(0)
        return [1 / (s.response != "bad") for s in samples]

    with pytest.raises(RewardError, match=r"ZeroDivisionError") as caught:
        reward(f)(samples("good", "bad"))
    assert "prompt 11" in str(caught.value)


def test_asynchronous_functions_run_at_the_same_time():
    """Each waits for the other: one after the other, they would never end."""
    both = threading.Barrier(2, timeout=60)

    async def meets(samples):
        await asyncio.to_thread(both.wait)
        return [1.0 for _ in samples]

    pair = [(FunctionReward(meets, name, {}, "reward.functions[0]"), 1.0) for name in ("one", "other")]
    assert RewardPipeline(pair, RewardConfig()).functions(samples("a")) == {"one": [1.0], "other": [1.0]}


@pytest.mark.parametrize(
    "path, words",
    [
        ("no_such_module_xyz:f", ["no_such_module_xyz", "ModuleNotFoundError"]),
        ("does/not/exist.py:f", ["exist.py", "no file"]),
        ("math:no_such_function", ["no_such_function", "math"]),
        ("just_a_word", ["module:function", "reasoning_gym"]),
        ("math.py:", ["module:function"]),
    ],
)
def test_not_importable_names_the_key_value_and_cause(path, words):
    config = RewardFunctionConfig(path=path if path != "math:no_such_function" else "json:no_such_function")
    with pytest.raises(RewardError) as caught:
        load_function(config, 2)
    text = str(caught.value)
    assert f"reward.functions[2].path={config.path!r}" in text
    assert all(word.replace("math", "json") in text or word in text for word in words)


def test_a_file_that_raises_while_imported_chains_the_cause(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('at import')\n")
    with pytest.raises(RewardError, match="RuntimeError: at import") as caught:
        load_function(RewardFunctionConfig(path=f"{file}:f"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_args_are_checked_before_any_call():
    with pytest.raises(RewardError, match=r"reward\.functions\[0\]\.args\.patern='x'.*pattern"):
        load_function(RewardFunctionConfig(path="format", args={"patern": "x"}))
    with pytest.raises(RewardError, match="pattern"):
        load_function(RewardFunctionConfig(path="format"))


def test_an_exception_names_the_sample_and_is_chained():
    def f(samples):
        return [1 / (s.response != "bad") for s in samples]

    with pytest.raises(RewardError) as caught:
        reward(f)(samples("good", "bad", "fine"))
    for word in ("mine", "ZeroDivisionError", "prompt 11", "sample 1", "'bad'", "reward.functions[3].path"):
        assert word in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_long_response_is_cut_in_the_message():
    def f(samples):
        raise KeyError("gone")

    with pytest.raises(RewardError) as caught:
        reward(f)(samples("y" * 1000))
    assert "y" * 200 in str(caught.value)
    assert "y" * 201 not in str(caught.value)


def test_an_exception_of_the_batch_alone_says_so():
    def f(samples):
        if len(samples) > 1:
            raise ValueError("too many")
        return [0.0]

    with pytest.raises(RewardError, match=r"batch of 2 samples.*none raises.*too many"):
        reward(f)(samples("a", "b"))


@pytest.mark.parametrize("result", [[1.0], [1.0, 2.0, 3.0], []])
def test_a_wrong_number_of_scores_is_refused(result):
    with pytest.raises(RewardError, match=f"`mine` returned {len(result)} scores: expected 2"):
        reward(lambda samples: result)(samples("a", "b"))


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), "1", [1.0], {}, 1j, torch.tensor(torch.nan)]
)
def test_a_score_that_is_no_number_is_refused(bad):
    with pytest.raises(RewardError, match=r"`mine` returned .* on prompt 11, sample 1, response 'b'"):
        reward(lambda samples: [0.0, bad])(samples("a", "b"))


@pytest.mark.parametrize("bad", [None, 1.0, "ab", {1: 2}, (x for x in (1, 2))])
def test_scores_that_are_no_list_are_refused(bad):
    with pytest.raises(RewardError, match="expected a list"):
        reward(lambda samples: bad)(samples("a", "b"))


def test_numbers_of_other_kinds_are_accepted():
    numpy = pytest.importorskip("numpy")
    rows = samples("a", "b")
    for values in (torch.tensor([1.0, 2.0]), numpy.array([1, 2]), (True, 2), [numpy.float32(1), torch.tensor(2)]):
        assert check_scores("x", values, rows) == [1.0, 2.0]
    assert check_scores("x", [None, 1], rows) == [None, 1.0]


@pytest.mark.parametrize("leaves", [SystemExit(0), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_function_that_wants_to_leave_the_program_is_an_error(leaves):
    """Code that a model wrote calls sys.exit: that may end neither the run nor this thread in silence."""

    def runs_code(samples):
        if any(s.response == "exit" for s in samples):
            raise leaves
        return [0.0] * len(samples)

    with pytest.raises(RewardError, match=rf"`mine` .*prompt 11, .*'exit': {type(leaves).__name__}"):
        reward(runs_code)(samples("fine", "exit"))


def test_a_file_that_leaves_the_program_is_an_error(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(RewardError, match=r"reward\.functions\[0\]\.path=.*importing .* raised SystemExit: 5"):
        load_function(RewardFunctionConfig(path=f"{tmp_path / 'leaves.py'}:f"))


def test_a_file_may_import_its_neighbour_and_shadows_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("POINTS = 0.25\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not me')\n")
    text = "def f(samples):\n    import colorsys, neighbour_of_mine as n\n    return [n.POINTS for _ in samples]\n"
    (tmp_path / "mine.py").write_text(text)
    loaded = load_function(RewardFunctionConfig(path=f"{tmp_path}/mine.py:f"))
    assert loaded(samples("a")) == [0.25]


def test_an_unknown_argument_is_told_which_ones_there_are_but_not_the_samples():
    with pytest.raises(RewardError, match=r"a parameter of `math`, which has field, timeout_s$"):
        load_function(RewardFunctionConfig(path="math", args={"column": "answer"}))
    with pytest.raises(RewardError, match=r"a parameter of `math`, which has field, timeout_s$"):
        load_function(RewardFunctionConfig(path="math", args={"samples": 1}))
