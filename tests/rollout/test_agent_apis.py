"""Agents that speak the responses API or Anthropic's messages API: the rows are those of the chat API."""

import json

import pytest

from tests.rollout.test_agents import play, tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
FILE = "tests/assets/api_agents.py"
CALL = 'so:\n<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'  # no client writes it so
LARGE = {"longest": 5000, "max_tokens": 50_000, "max_turns": 50}
__all__ = ["play", "tokenizer"]


def script(text, seed):
    last = text.rpartition("<|user|>")[2]
    return CALL if "add 1" in last and "<tool_call>" not in last else "it is 3" if "sure" not in last else "yes "


def talks(play, kinds, folder):
    both = [(kind, stream) for kind in kinds for stream in (False, True)]
    (sample,), generations, engine = play(f"{FILE}:speak", script, {"talks": both}, folder=folder, **LARGE)
    assert sample.trajectory.reward == 1.0, sample.trajectory.failure
    return sample, generations, [engine.given[i : i + 4] for i in range(0, 4 * len(both), 4)]


def value_of(tmp_path, folder):
    """Return what the agent returned."""
    lines = (tmp_path / folder / "step-00000001-rank-00000.jsonl").read_text().splitlines()
    return json.loads(lines[-1].partition(" ")[2])[3]["value"]["value"]


def check(play, kinds, tokenizer, tmp_path):
    _, _, (chat, streamed) = talks(play, ["chat"], "chat")
    sample, generations, prompts = talks(play, kinds, "others")
    assert chat == streamed and all(own == chat for own in prompts)  # to the token
    first, second, third, edited = map(tokenizer.decode, chat)
    assert second.startswith(f"{first}{CALL}<eos>") and third.startswith(f"{second}it is 3<eos>")
    assert "brief" in first and "really?" in edited and "it is 4" in edited and "yes " not in edited
    # a segment for each conversation, and for each edited reply
    assert sample.trajectory.rows == 2 * len(prompts) and sample.trajectory.turns == 4 * len(prompts)
    assert generations.forks[0].unique().tolist() == list(range(2 * len(prompts)))
    heard = value_of(tmp_path, "others")["heard"]
    assert heard == value_of(tmp_path, "chat")["heard"][:1] * len(prompts)
    assert heard[0][1:] == ["it is 3", "yes ", "it is 3"]


def test_rows_of_the_responses_api_are_those_of_chat(play, tokenizer, tmp_path):
    check(play, ["responses"], tokenizer, tmp_path)


def test_rows_of_the_messages_api_are_those_of_chat(play, tokenizer, tmp_path):
    pytest.importorskip("anthropic")
    check(play, ["messages"], tokenizer, tmp_path)


def test_requests_at_a_time_are_answered_in_turn_and_errors_are_those_of_the_api(play, tmp_path):
    (sample,), _, engine = play(f"{FILE}:both", lambda text, _: text.split("|>")[1][:3], **LARGE)
    assert sample.trajectory.turns == sample.trajectory.rows == len(engine.given) == 2
    value = value_of(tmp_path, "run")
    assert value["texts"] == ["one", "two"]
    own, other = value["errors"]
    assert own["error"]["param"] == "model" and own["error"]["code"] == "model_not_found"
    assert other == {"type": "error", "error": {"type": "not_found_error", "message": own["error"]["message"]}}
