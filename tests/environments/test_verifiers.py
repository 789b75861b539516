"""An environment of verifiers, unchanged, against a server that speaks OpenAI's chat API."""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from aligner.errors import MissingExtraError
from aligner.types import Stop
from tests.rollout.test_agents import play, tokenizer
from tests.rollout.test_trajectory_generator import call

FILE = "tests/assets/verifiers_environments.py"
__all__ = ["play", "tokenizer"]
LEGS = {"gym": "leg_counting", "num_train_examples": 3, "num_eval_examples": 1}
PATH = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"


def completion(text):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def test_its_own_rows_prompts_and_scores(server):
    pytest.importorskip("verifiers")
    from aligner.environments.verifiers import load
    from aligner.environments.verifiers import play as play_row

    handler = signal.getsignal(signal.SIGTERM)
    made = load(PATH, LEGS)
    row = made.get_dataset()[1]
    entry = made.rg_dataset[1]
    asked = SimpleNamespace(messages=row["prompt"], row={"answer": row["answer"], "info": row["info"], "x": 1}, seed=1)
    sampling = {"model": "policy", "temperature": 0.5, "max_tokens": 9}
    for text, reward in ((entry["answer"], 1.0), ("-3", 0.0)):
        server.reply = lambda body, answer=text: (200, completion(f"<answer>{answer}</answer>"))
        with ThreadPoolExecutor() as pool:  # as agents run
            answer = pool.submit(asyncio.run, play_row(asked, f"{server.base_url}/v1", sampling, PATH, LEGS)).result()
        assert answer["reward"] == pytest.approx(reward, abs=0.02), text
        assert answer["check_answer_reward_func"] == pytest.approx(reward, abs=0.02)
    assert signal.getsignal(signal.SIGTERM) is handler
    sent = server.bodies[0]
    assert sent["temperature"] == 0.5 and sent["model"] == "policy"
    assert sent["messages"][-1] == {"role": "user", "content": entry["question"]}
    server.reply = lambda body: (500, {})
    assert asyncio.run(play_row(asked, f"{server.base_url}/v1", sampling, PATH, LEGS))["reward"] is None


@pytest.mark.parametrize(
    "name, says, texts, settings, end",
    [
        ("guess", ["5", "9", "7"], ["higher", "lower"], {}, (Stop.DONE, 1.0)),
        ("sums", [call("add", a=3, b=4), call("add", a=3), "7"], ["7", "missing"], {}, (Stop.DONE, 1.0)),
        ("guess", ["5", "9"], ["higher", "lower"], {"max_turns": 2}, (Stop.TURNS, 0.25)),
    ],
)
def test_several_turns_are_one_row_of_the_models_own_tokens(play, tokenizer, name, says, texts, settings, end):
    pytest.importorskip("verifiers")
    answers, row = iter(says), {"answer": "7", "info": {"low": 1}}
    agent = "aligner.environments.verifiers:play"
    settings = {"args": {"env": f"{FILE}:{name}"}, "longest": 900} | settings
    (sample,), _, engine = play(agent, lambda *_: next(answers), row, **settings)
    trajectory = sample.trajectory
    assert (trajectory.stop, trajectory.reward) == end, trajectory.failure
    assert (trajectory.turns, trajectory.rows) == (len(says), 1)
    own = [message for message in trajectory.messages if message["role"] != "assistant"]
    assert all(text in message["content"] for text, message in zip(texts, own, strict=True))
    for before, text, after in zip(engine.given, says, engine.given[1:], strict=False):
        assert tokenizer.decode(after).startswith(f"{tokenizer.decode(before)}{text}<eos>")


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "aligner.environments.verifiers", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'aligner\[verifiers\]'"):
        import aligner.environments.verifiers  # noqa: F401
