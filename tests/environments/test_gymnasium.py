"""An environment of Gymnasium, unchanged, in a worker and in a run."""

import json
import sys

import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.errors import EnvironmentCodeError
from tests import stages

PATH = "aligner.environments.gymnasium:Gymnasium"
LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "options": {"is_slippery": False}}


def test_a_lake_is_crossed_by_calls(tmp_path):
    pytest.importorskip("gymnasium")
    cfg = EnvironmentConfig(path=PATH, args=LAKE, workers=1)
    reported = schemas(load_tools(cfg))
    assert [one["function"]["name"] for one in reported] == ["act"]
    pool, session = Pool(cfg, reported, AnswerLog(tmp_path, 0)), Session("1", 3, {}, logged=False)
    opening = pool.ask(session, "reset", seed=3, row={}).result(300)["value"]
    assert opening.splitlines()[1:2] == ["[S]FFF"] and "left, down, right, up" in opening
    moves = ["down", "north", "down", "right", "right", "down", "right"]
    results = [
        pool.ask(session, "turn", calls=[{"name": "act", "arguments": {"action": move}}]).result(300)["value"]
        for move in moves
    ]
    assert results[1]["texts"] == ["error: 'north' is none of left, down, right, up"]
    assert [one["reward"] for one in results] == [0.0] * 6 + [1.0] and [one["done"] for one in results] == [
        False
    ] * 6 + [True]
    assert "HFF[G]" in results[-1]["texts"][0]
    assert pool.ask(session, "score").result(300)["value"] == 0.0  # all of it is in the turns


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "expected 4 names of actions, found 1"),
        ({"id": "Pendulum-v1", "options": {"render_mode": None}}, "expected discrete actions, or texts"),
    ],
)
def test_what_no_model_can_play(args, words):
    pytest.importorskip("gymnasium")
    with pytest.raises((TypeError, ValueError), match=words):
        load_tools(EnvironmentConfig(path=PATH)).kind(**args)


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "aligner.environments.gymnasium", raising=False)
    with pytest.raises(EnvironmentCodeError, match=r"environment\.path=.*pip install 'aligner\[gymnasium\]'"):
        load_tools(EnvironmentConfig(path=PATH))


@pytest.mark.slow
def test_a_run_plays_it(tmp_path):
    """A model that knows no more than to call something: what it hears is in its samples."""
    pytest.importorskip("gymnasium")
    from aligner.data.tokenizer import train_tokenizer
    from examples.calculator import TEMPLATE

    train_tokenizer(["act", "left"], str(tmp_path / "tokenizer"), 300, chat_template=TEMPLATE)
    data = stages.write_jsonl(tmp_path / "train.jsonl", [{"prompt": "cross"}] * 4)
    overrides = [
        f"environment.path={PATH}",
        "environment.args={id: FrozenLake-v1, actions: [left, down, right, up], options: {is_slippery: false}}",
        "environment.max_tokens=32",
    ]
    overrides += ["model.max_position=2048", "data.max_prompt_tokens=1024", "batch.prompts=4", "run.steps=1"]
    overrides += ["reward.functions=[]", f"data.train={data}", "environment.workers=1", "run.samples_every=1"]
    run = stages.stage("grpo", tmp_path, tmp_path / "run", *overrides, "logging.samples_shown=1")
    (row, *_) = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert "[S]FFF" in row["prompt"] and row["trajectory"]["turns"][0]["role"] == "assistant"
