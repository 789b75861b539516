"""An environment of verifiers, unchanged, against a server that speaks OpenAI's chat API."""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from aligner.errors import MissingExtraError

LEGS = {"gym": "leg_counting", "num_train_examples": 3, "num_eval_examples": 1}
PATH = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"


def completion(text):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def test_its_own_rows_prompts_and_scores(server):
    pytest.importorskip("verifiers")
    from aligner.environments.verifiers import load, play

    handler = signal.getsignal(signal.SIGTERM)
    made = load(PATH, LEGS)
    row = made.get_dataset()[1]
    entry = made.rg_dataset[1]
    asked = SimpleNamespace(messages=row["prompt"], row={"answer": row["answer"], "info": row["info"], "x": 1}, seed=1)
    sampling = {"model": "policy", "temperature": 0.5, "max_tokens": 9}
    for text, reward in ((entry["answer"], 1.0), ("-3", 0.0)):
        server.reply = lambda body, answer=text: (200, completion(f"<answer>{answer}</answer>"))
        with ThreadPoolExecutor() as pool:  # as agents run
            answer = pool.submit(asyncio.run, play(asked, f"{server.base_url}/v1", sampling, PATH, LEGS)).result()
        assert answer["reward"] == pytest.approx(reward, abs=0.02), text
        assert answer["check_answer_reward_func"] == pytest.approx(reward, abs=0.02)
    assert signal.getsignal(signal.SIGTERM) is handler
    sent = server.bodies[0]
    assert sent["temperature"] == 0.5 and sent["model"] == "policy"
    assert sent["messages"][-1] == {"role": "user", "content": entry["question"]}
    server.reply = lambda body: (500, {})
    assert asyncio.run(play(asked, f"{server.base_url}/v1", sampling, PATH, LEGS))["reward"] is None


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "aligner.environments.verifiers", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'aligner\[verifiers\]'"):
        import aligner.environments.verifiers  # noqa: F401
