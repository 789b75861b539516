"""Trajectories of a scripted engine with real tools, environments and tokenizer: rows, masks, ends, rewards."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.answers import AnswerLog
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.environment import EnvironmentConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.data.dialogue import Dialogue
from aligner.data.tokenizer import train_tokenizer
from aligner.data.tool_calls import written
from aligner.engines.base import RolloutEngine
from aligner.environments.limits import CHARS
from aligner.environments.pool import Pool
from aligner.environments.tools import load_tools, schemas
from aligner.errors import EnvironmentFailedError
from aligner.rewards.composite import RewardPipeline, Scores
from aligner.rewards.environment import EnvironmentReward
from aligner.rollout.collate import collate
from aligner.rollout.loss_inputs import sample_rows
from aligner.rollout.requests import Request
from aligner.rollout.score import Scorer
from aligner.rollout.source import RolloutSource
from aligner.rollout.statistics import trajectory_sums
from aligner.rollout.trajectory_generator import TrajectoryContext, TrajectoryGenerator
from aligner.types import LENGTH, STOP, Generations, Prompt, SamplingParams, Stop
from examples.calculator import TEMPLATE

FILE = "tests/assets/environments.py"
CUT = "..."  # ends a scripted answer that meets the token limit


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return train_tokenizer([], str(tmp_path_factory.mktemp("calls")), 261, chat_template=TEMPLATE)


class Scripted(RolloutEngine):
    """Says what `script(text of the prompt, seed)` says; the logprob of token t is -t / 1000."""

    weight_version = 3

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.given = tokenizer, script, []

    def generate(self, prompts, seeds, sampling, progress=None):
        rows, reasons = [], []
        for prompt, own in zip(prompts, seeds, strict=True):
            for seed in own:
                self.given.append(tuple(prompt))
                text = self.script(self.tokenizer.decode(prompt), seed)
                cut = text.endswith(CUT)
                rows.append(self.tokenizer.encode(text) + ([] if cut else [self.tokenizer.eos_token_id]))
                reasons.append(LENGTH if cut else STOP)
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return Generations(tokens, torch.tensor([*map(len, rows)]), -tokens / 1000, torch.tensor(reasons), 3)


@pytest.fixture
def play(tokenizer, tmp_path, world):
    """play(script, requests=, folder=, **environment) -> (groups, generator)."""

    def make(script, seeds=((5,),), row=None, folder="run", rollout=1, tokenizer=tokenizer, **settings):
        cfg = EnvironmentConfig(**{"workers": 1, "max_tokens": 400} | settings)
        tools = load_tools(cfg)
        dialogue = Dialogue(tokenizer, schemas(tools))
        pool = Pool(cfg, dialogue.tools, AnswerLog(tmp_path / folder, 0))
        engine = Scripted(tokenizer, script)
        sampling = SamplingParams(60, stop_token_ids=(tokenizer.eos_token_id,))
        generator = TrajectoryGenerator(
            engine, tokenizer, sampling, world, outside=TrajectoryContext(pool, dialogue, cfg, 100, tools.scores)
        )
        messages = ({"role": "user", "content": "q"},)
        next_prompt = dialogue.begin(list(messages))
        prompt = Prompt(0, next_prompt.tokens, next_prompt.text, row or {}, messages)
        return generator([Request(i, prompt, list(s), rollout) for i, s in enumerate(seeds)]), generator

    return make


def call(name, **arguments):
    return written("hermes", name, arguments)


def twice(text, seed):
    return call("add", a=1, b=2) if "<tool_call>" not in text else "it is 3"


def test_a_row_is_what_the_engine_saw_and_only_answers_count(play, tokenizer):
    groups, generator = play(twice, seeds=((5, 6),), tools=[f"{FILE}:add"])
    batch = collate(groups.samples, groups.generations, torch.tensor([0, 0]), tokenizer.pad_token_id)
    for i, sample in enumerate(groups.samples):
        last = generator.engine.given[2 + i]
        row, n = batch.tokens[i].tolist(), int(batch.lengths[i])
        assert tuple(row[: len(last)]) == last and sample.prompt.tokens + sample.tokens == tuple(row[:n])
        own = [t for t, m in zip(row, batch.response_mask[i].tolist(), strict=True) if m]
        assert tokenizer.decode(own) == f"{call('add', a=1, b=2)}<eos>it is 3<eos>"
        assert batch.rollout_logprobs[i].tolist() == pytest.approx(
            [-t / 1000 * m for t, m in zip(row, batch.response_mask[i].tolist(), strict=True)]
        )
        assert "<|system|>3<|assistant|>" in tokenizer.decode(row)
        assert sample.response == "it is 3" and sample.finished and bool(batch.finished[i])
        messages = sample.trajectory.messages
        assert [m["role"] for m in messages] == ["assistant", "tool", "assistant"] and messages[1]["content"] == "3"
        assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
        assert (sample.trajectory.turns, sample.trajectory.stop, sample.trajectory.rows) == (2, Stop.ANSWER, 1)
    assert not batch.forks.any()


def test_what_is_shown_of_a_trajectory(play, tokenizer):
    """Each answer with its tokens, those that count; what tools gave, with the reward of the turn."""
    answers = iter([call("guess", number=0), call("guess", number=1), "well"])
    groups, _ = play(lambda text, seed: next(answers), path=f"{FILE}:Guess", args={"top": 2}, max_turns=3)
    batch = collate(groups.samples, groups.generations, torch.tensor([0]), tokenizer.pad_token_id)
    component = [groups.samples[0].trajectory.reward]
    scores = Scores(component, component, {"environment": component}, [True], [False])
    (row,) = sample_rows(batch, scores, 1)
    trajectory = row.record()["trajectory"]
    assert [turn["role"] for turn in trajectory["turns"]] == ["assistant", "tool"] * (len(trajectory["turns"]) // 2)
    own = [turn for turn in trajectory["turns"] if "tokens" in turn]
    assert own[0]["text"] == 'guess({"number": 0})' and trajectory["stop"] == "done"
    assert [turn["tokens"] for turn in own] == [len(tokenizer.encode(call("guess", number=0))) + 1] * len(own)
    assert sum(turn["tokens"] for turn in own) == int(batch.response_mask.sum())
    rewards = [turn.get("reward") for turn in trajectory["turns"] if "tokens" not in turn]
    assert rewards == [0.0] * (len(rewards) - 1) + [0.25] and trajectory["reward"] == 1.0 + sum(rewards)
    batch.loss_mask = torch.zeros_like(batch.response_mask)
    (row,) = sample_rows(batch, scores, 1)
    assert {turn.get("tokens", 0) for turn in row.trajectory["turns"]} == {0}


def test_a_part_that_is_rendered_anew_is_a_fork_of_the_same_row(play, tmp_path):
    forgets = TEMPLATE.replace("in messages -", "in messages[-4:] -")
    own = train_tokenizer([], str(tmp_path / "own"), 261, chat_template=forgets)
    answers = iter([call("add", a=1, b=1), call("add", a=2, b=2), "done"])
    groups, generator = play(lambda text, seed: next(answers), tokenizer=own, tools=[f"{FILE}:add"], max_tokens=4000)
    batch = collate(groups.samples, groups.generations, torch.tensor([0]), own.pad_token_id)
    _, second, third = generator.engine.given
    row, n = batch.tokens[0], int(batch.lengths[0])
    parts = [row[:n][batch.forks[0, :n] == k].tolist() for k in (0, 1)]
    assert tuple(parts[0][: len(second)]) == second and tuple(parts[1][: len(third)]) == third
    own_rows = own.decode(row[batch.response_mask[0].bool()])
    assert own_rows == f"{call('add', a=1, b=1)}<eos>{call('add', a=2, b=2)}<eos>done<eos>"
    assert groups.samples[0].trajectory.rows == 2 and batch.forks[0, n - 1] == 1


@pytest.mark.parametrize(
    "stop, script, settings",
    [
        (Stop.TURNS, lambda text, seed: call("add", a=1, b=1), {"max_turns": 3}),
        (Stop.TOKENS, lambda text, seed: call("add", a=1, b=1), {"max_tokens": 200}),
        (Stop.LENGTH, lambda text, seed: f"<tool_call>{CUT}", {}),
        (Stop.SECONDS, lambda text, seed: call("divide", a=1, b=1), {"max_seconds": 1e-6}),
    ],
)
def test_what_ends_a_trajectory_before_it_ends(play, stop, script, settings):
    groups, _ = play(script, tools=[f"{FILE}:add", f"{FILE}:divide"], **settings)
    (sample,) = groups.samples
    assert sample.trajectory.stop == stop and not sample.finished
    assert len(sample.tokens) <= settings.get("max_tokens", 400)
    sums, maxima = trajectory_sums(groups.samples)
    assert sums[f"stop/{stop}"] == (1.0, 1.0) and sum(n for name, (n, _) in sums.items() if "stop/" in name) == 1.0
    assert maxima["environment/turns_max"] == sample.trajectory.turns


def test_wrong_calls_are_answered_and_counted(play):
    answers = iter(["<tool_call>{oops</tool_call>", call("subtract"), call("add", a="1", b=2), "well"])
    groups, _ = play(lambda text, seed: next(answers), tools=[f"{FILE}:add"], max_tokens=1000)
    (sample,) = groups.samples
    messages = [m["content"] for m in sample.trajectory.messages if m["role"] == "tool"]
    assert [text.partition(" (")[0] for text in messages] == [
        "error: this call is not valid JSON",
        "error: there is no tool 'subtract': there are add",
        "error: add: a: '1' is no integer",
    ]
    assert sample.trajectory.wrong == 3 and sample.finished


def guesses(text, seed):
    """Halves what is left of below 4, as the environment opens."""
    assert "below 4" in text
    tried = text.count("<tool_call>")
    return call("guess", number=[1, 2, 3, 0][tried])


def test_an_environment_opens_plays_and_rewards(play):
    groups, _ = play(guesses, seeds=((5, 6), (7, 8)), path=f"{FILE}:Guess", gamma=0.5, max_tokens=1000)
    for sample in groups.samples:
        trajectory = sample.trajectory
        assert trajectory.stop == Stop.DONE and sample.finished
        last = 0.5 ** (trajectory.turns - 1)
        assert trajectory.reward == pytest.approx(1.25 * last)  # of the turn 1/4, at the end 1, discounted alike
        assert sample.prompt.messages == ({"role": "user", "content": "q\n\nbelow 4"},)
    turns = [sample.trajectory.turns for sample in groups.samples]
    assert turns[0] == turns[1] and turns[2] == turns[3]  # a group has one seed


def test_a_failing_environment_makes_the_sample_invalid_never_zero(play, tmp_path, world):
    rows = {"kind": "raised"}
    settings = {"path": f"{FILE}:Troubled", "args": {"folder": str(tmp_path), "fails": 99}, "retries": 1}
    groups, _ = play(lambda text, seed: call("guess", number=0) if seed == 5 else "no", ((5, 6),), rows, **settings)
    broken = groups.samples[0]
    assert broken.trajectory.stop == Stop.FAILED and broken.trajectory.failure == "raised: ConnectionError: no network"
    assert broken.trajectory.retried == 1 and broken.trajectory.reward is None
    log = AnswerLog(tmp_path / "run", 0)
    log.begin(1)
    scorer = Scorer(RewardPipeline([(EnvironmentReward(), 2.0)], RewardConfig(), answers=log), world)
    scores = scorer.combined(scorer(groups), update=False)
    assert math.isnan(scores.total[0]) and scores.valid == [False, True] and scores.total[1] == 0.0
    sums, _ = trajectory_sums(groups.samples)
    assert sums["environment/failed_raised"] == (1.0, 2.0) and sums["environment/retried"] == (1.0, 2.0)
    with pytest.raises(
        EnvironmentFailedError, match=r"first one, asked 2 times \(environment\.retries\), .*no network"
    ):
        RolloutSource(
            None, None, SimpleNamespace(drop_in_flight=lambda step: step), scorer, AlgorithmConfig()
        )._check_failures(1, [broken], {"environment/failed": 1.0})
    answers = (tmp_path / "run" / "step-00000001-rank-00000.jsonl").read_text()  # a later start asks again
    assert "no network" not in answers and len(answers.splitlines()) == 3
    shy, _ = play(lambda text, seed: "no", path=f"{FILE}:Shy", folder="shy")  # no reward is none, not 0
    assert scorer.combined(scorer(shy), update=False).valid == [False]


PARTS = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]


def test_messages_of_an_opening_are_read_as_those_of_rows(play, tmp_path):
    """A list of parts is its text, and no list in Python's own writing."""
    opening = [{"role": "user", "content": PARTS, "name": None}]
    (tmp_path / "opens.py").write_text(f"class Opens:\n    def reset(self, seed):\n        return {opening}\n")
    seen = []
    groups, _ = play(lambda text, seed: seen.append(text) or "fine", path=f"{tmp_path / 'opens.py'}:Opens")
    assert groups.samples[0].prompt.messages[-1] == {"role": "user", "content": "be brief"}
    assert seen and all("be brief" in text and "type" not in text for text in seen)


OPENS = {
    "tokens": (
        "'x' * 200",
        Stop.PROMPT,
        r"prompt: environment\.path: reset made a prompt of 2\d\d tokens: .*_tokens=100",
    ),
    "characters": ("'x' * 3_000_000", Stop.PROMPT, r"prompt: .* of 3000003 characters: expected at most .*_tokens=100"),
    "a list": ("[{'role': 'user', 'content': 'y' * 40}] * 5", Stop.PROMPT, r"prompt: .* tokens"),
    "what no template renders": ("'bad'", Stop.TEMPLATE, r"template: "),
    "no role": (
        "[{'role': 'asistant', 'content': 'hi'}]",
        Stop.TEMPLATE,
        r"template: environment\.path, reset\[0\]\.role='asistant'.*'assistant'",
    ),
    "a picture": (
        "[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}]",
        Stop.TEMPLATE,
        r"template: environment\.path: .*found the part",
    ),
    "no text": ("[{'role': 'user', 'content': 3}]", Stop.FAILED, r"raised: TypeError: reset returned"),
    "a size beyond an answer's": ("'x' * (17 << 20)", Stop.FAILED, r"raised: ValueError: an answer of \d+ bytes"),
}


@pytest.mark.parametrize("kind", OPENS)
def test_one_opening_that_cannot_be_ends_one_trajectory(play, tmp_path, world, kind):
    """Of a group with good ones; its reason is counted, and a rollout of nothing else says it."""
    opening, stop, words = OPENS[kind]
    refuses = "{% if 'bad' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}"
    own = train_tokenizer([], str(tmp_path / "own"), 261, chat_template=refuses + TEMPLATE)
    (tmp_path / "opens.py").write_text(
        "class Opens:\n"
        "    def reset(self, seed, n):\n"
        f"        return 'so' if n else {opening}\n\n"
        "    def get_reward(self):\n        return 1.0\n"
    )
    settings = {"path": f"{tmp_path / 'opens.py'}:Opens", "tools": [f"{FILE}:add"], "retries": 0, "tokenizer": own}
    groups, _ = play(lambda text, seed: "fine", seeds=((5, 6),), row={"n": 0}, **settings)
    good, _ = play(lambda text, seed: "fine", seeds=((5, 6),), row={"n": 1}, folder="good", **settings)
    for sample in groups.samples:
        trajectory = sample.trajectory
        assert (
            trajectory.stop == stop
            and re.search(words, trajectory.failure)
            and not sample.tokens
            and trajectory.turns == 0
        )
    assert all(not sample.trajectory.failure and sample.finished for sample in good.samples)
    sums, _ = trajectory_sums([*groups.samples, *good.samples])
    assert sums[f"stop/{stop}"] == (2.0, 4.0) and sums["environment/failed"] == (2.0, 4.0)
    scorer = Scorer(RewardPipeline([(EnvironmentReward(), 1.0)], RewardConfig()), world)
    scores = scorer.combined(scorer(groups), update=False)
    assert scores.valid == [False, False] and all(map(math.isnan, scores.total))
    with pytest.raises(EnvironmentFailedError, match=words):
        RolloutSource(
            None, None, SimpleNamespace(drop_in_flight=lambda step: step), scorer, AlgorithmConfig()
        )._check_failures(1, groups.samples, {"environment/failed": 1.0})


@pytest.mark.parametrize("name", ["long", "endless"])
def test_a_long_result_leaves_no_room_and_is_cut_for_the_log(play, tmp_path, name):
    """100 MB of text, by one call or by many."""
    (tmp_path / "says.py").write_text(
        "class Says:\n    def reset(self, seed):\n        pass\n\n"
        '    def long(self) -> str:\n        """Says."""\n        return "a b " * 25_000_000\n\n'
        '    def endless(self) -> str:\n        """Says."""\n        return "\\x01" * 10_000_000\n'
    )
    script = lambda text, seed: "\n".join([call(name)] * (1 if name == "long" else 3))  # noqa: E731
    groups, _ = play(script, path=f"{tmp_path / 'says.py'}:Says", max_tokens=200)
    (sample,) = groups.samples
    assert sample.trajectory.stop == Stop.TOKENS and not sample.trajectory.failure and len(sample.tokens) <= 200
    texts = [message["content"] for message in sample.trajectory.messages if message["role"] == "tool"]
    assert all("(cut here, of " in text for text in texts)
    assert 200 < sum(map(len, texts)) < 200 * CHARS + 100 * len(texts)
    assert (tmp_path / "run" / "step-00000001-rank-00000.jsonl").stat().st_size < 1 << 20


@pytest.mark.slow
def test_a_rollout_made_again_hears_the_same_and_evaluation_is_not_logged(play, tmp_path):
    def rolls(text, seed):
        return call("roll") if text.count("<tool_call>") < 2 else "so"

    seeds = ((5, 6, 7, 8),)
    first, _ = play(rolls, seeds, path=f"{FILE}:Dice")
    again, _ = play(rolls, seeds, path=f"{FILE}:Dice")
    other, _ = play(rolls, seeds, path=f"{FILE}:Dice", folder="other")
    assert again.samples == first.samples and other.samples != first.samples
    assert torch.equal(again.generations.tokens, first.generations.tokens)
    play(rolls, seeds, path=f"{FILE}:Dice", folder="none", rollout=0)
    assert not (tmp_path / "none").exists()
    lines = (tmp_path / "run" / "step-00000001-rank-00000.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 4 and all(len(json.loads(line.partition(" ")[2])) == 4 for line in lines)


@pytest.mark.parametrize("hides", [True, False])
def test_one_whose_environment_cannot_be_rebuilt_begins_again_and_a_further_start_repeats_that(
    play, tmp_path, capfd, hides
):
    """After a kill between its third roll and the verdict."""
    rolls = lambda text, seed: call("roll") if text.count("<tool_call>") < 3 else "so"  # noqa: E731
    settings = {"path": f"{FILE}:Starts", "args": {"folder": str(tmp_path), "hides": hides}}
    log, starts = tmp_path / "run" / "step-00000001-rank-00000.jsonl", tmp_path / "starts"
    whole, _ = play(rolls, **settings)
    lines = log.read_text().splitlines(True)
    log.write_text("".join(lines[:4]))
    capfd.readouterr()
    second, generator = play(rolls, **settings)
    (old,), (new,) = whole.samples, second.samples
    warned = capfd.readouterr().err
    if hides:  # the same bits, from one new environment
        for one in (old, new):
            one.trajectory = replace(one.trajectory, seconds=0.0)
        assert new == old and starts.read_text() == "xx" and not warned and len(log.read_text().splitlines()) == 5
        return
    assert starts.read_text() == "xxx" and new.trajectory.restarted == 1 and new.trajectory.retried == 0
    assert new.trajectory.reward == 3.3 and new.trajectory.turns == 4
    texts = [message["content"] for message in new.trajectory.messages if message["role"] == "tool"]
    assert texts == ["0", "3", "3"] and new.prompt.text == old.prompt.text
    (line,) = warned.splitlines()
    assert line.endswith(
        "trajectory 5 of rollout 1 begins again: question 2, roll {}, was answered by '1', and now by '2'"
    )
    assert log.read_text().startswith("".join(lines[:4]))  # what the run has seen, with the reason that it ends there
    assert trajectory_sums([new])[0]["environment/restarted"] == (1.0, 1.0)
    third, repeated = play(rolls, **settings)
    assert third.samples == second.samples and starts.read_text() == "xxx"  # the log answers all
    assert torch.equal(third.generations.logprobs, second.generations.logprobs)
    assert torch.equal(third.generations.tokens, second.generations.tokens)
    assert repeated.engine.given == generator.engine.given and len(generator.engine.given) == 4 + 4  # the same steps
