"""Trajectories of real agents with a scripted engine: rows, masks, ends, rewards; what requests ask of an answer."""

import json

import pytest
import torch

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.data.dialogue import Dialogue
from aligner.data.tokenizer import train_tokenizer
from aligner.environments.limits import MAX_REQUEST
from aligner.environments.openai_api import ChatRequest
from aligner.environments.pool import Pool
from aligner.rollout.agents import AgentGenerator, Dialogues, message_of, parse_answer
from aligner.rollout.collate import collate
from aligner.rollout.requests import Request
from aligner.rollout.statistics import trajectory_sums
from aligner.rollout.trajectory_generator import TrajectoryContext
from aligner.types import Prompt, SamplingParams, Stop
from tests.chat_templates import MISTRAL, QWEN3
from tests.rollout.test_trajectory_generator import CUT, Scripted, call, tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
FILE = "tests/assets/agents.py"
QUESTION = ({"role": "user", "content": "q"},)
__all__ = ["tokenizer"]


@pytest.fixture
def play(tokenizer, tmp_path, world):
    """play(agent, script, row) -> (samples, generations, engine)."""

    def make(agent, script, row=None, seeds=((5,),), folder="run", longest=100, tokenizer=tokenizer, **settings):
        agent = agent if ".py" in agent or ":" in agent else f"{FILE}:{agent}"
        cfg = EnvironmentConfig(**{"agent": agent, "workers": 1, "max_tokens": 1000} | settings)
        plain = Dialogue(tokenizer, [])
        dialogues = Dialogues(lambda tools: Dialogue(tokenizer, tools))
        pool = Pool(cfg, [], AnswerLog(tmp_path / folder, 0))
        engine = Scripted(tokenizer, script)
        sampling = SamplingParams(100, stop_token_ids=(tokenizer.eos_token_id,))
        outside = TrajectoryContext(pool, plain, cfg, longest, True)
        generator = AgentGenerator(engine, tokenizer, sampling, world, outside=outside, dialogues=dialogues)
        next_prompt = plain.begin(list(QUESTION))
        prompt = Prompt(0, next_prompt.tokens, next_prompt.text, row or {}, QUESTION)
        groups = generator([Request(i, prompt, list(s), 1) for i, s in enumerate(seeds)])
        return groups.samples, groups.generations, engine

    return make


def twice(text, seed):
    return call("add", a=1, b=2) if "<tool_call>" not in text else "it is 3"


@pytest.mark.slow
def test_a_row_is_what_the_engine_saw_and_only_answers_count(play, tokenizer):
    samples, generations, engine = play("calculate", twice, seeds=((5, 6),))
    batch = collate(samples, generations, torch.tensor([0, 0]), tokenizer.pad_token_id)
    for i, sample in enumerate(samples):
        first, last = engine.given[i], engine.given[2 + i]
        row, n = batch.tokens[i].tolist(), int(batch.lengths[i])
        assert sample.prompt.tokens == first and tuple(row[: len(last)]) == last
        assert "add" in sample.prompt.text  # the agent's tools, by the template
        own = [t for t, m in zip(row, batch.response_mask[i].tolist(), strict=True) if m]
        assert tokenizer.decode(own) == f"{call('add', a=1, b=2)}<eos>it is 3<eos>"
        assert sample.prompt.tokens + sample.tokens == tuple(row[:n])
        trajectory = sample.trajectory
        assert (trajectory.turns, trajectory.stop, trajectory.rows, trajectory.reward) == (2, Stop.DONE, 1, 1.0)
        assert [m["role"] for m in trajectory.messages] == ["assistant", "tool", "assistant"] and sample.finished
    assert not batch.forks.any()


@pytest.mark.parametrize("template", [QWEN3, MISTRAL])
def test_the_engines_tokens_stay_whatever_a_client_makes_of_an_answer(play, tmp_path, template):
    """A client sends calls back as OpenAI has them; the template sees what the model wrote, or its own way of it."""
    ended = template.replace("</s>", "<eos>")  # by the token that this tokenizer has
    own = train_tokenizer([], str(tmp_path / "own"), 261, chat_template=ended)
    wrote = '<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'
    wrote = wrote if template is QWEN3 else '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    answers = iter([wrote, "3"])
    (sample,), _, engine = play("calculate", lambda *_: next(answers), tokenizer=own, longest=900, max_tokens=2000)
    assert sample.trajectory.stop == Stop.DONE and sample.trajectory.reward == 1.0
    if template is QWEN3:
        assert own.decode(engine.given[1]).count(wrote) == 1 and sample.trajectory.rows == 1


@pytest.mark.slow
def test_other_conversations_of_an_agent_are_parts_of_its_row(play):
    requests = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    (sample,), generations, _ = play("asks", lambda *_: "well", {"requests": requests})
    assert sample.trajectory.rows == 2 and sample.trajectory.turns == 2
    assert generations.forks[0].unique().tolist() == [0, 1]
    assert sample.prompt.messages == ({"role": "user", "content": "one"},)
    messages = [m["content"] for m in sample.trajectory.messages]
    assert messages == ["well", "two", "well"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop, script, settings",
    [
        (Stop.TURNS, lambda *_: "so", {"max_turns": 3}),
        (Stop.TOKENS, lambda *_: "so", {"max_tokens": 120}),
        (Stop.SECONDS, lambda *_: "so", {"max_seconds": 1e-6}),
    ],
)
def test_a_budget_ends_a_trajectory_and_its_agent_says_what_it_is_worth(play, stop, script, settings):
    (sample,), _, _ = play("stubborn", script, {"verdict": 0.25}, **settings)
    assert sample.trajectory.stop == stop and not sample.finished and sample.trajectory.reward == 0.25
    sums, _ = trajectory_sums([sample])
    assert sums[f"stop/{stop}"] == (1.0, 1.0)
    (dies,), _, _ = play("stubborn", script, {}, folder="dies", **settings)
    assert dies.trajectory.stop == stop and dies.trajectory.reward is None and not dies.trajectory.failure


@pytest.mark.slow
def test_what_failed_is_invalid_and_an_answer_that_was_cut_is_unfinished(play, tmp_path):
    (silent,), _, _ = play("silent", twice)
    assert silent.trajectory.stop == Stop.FAILED and "without a request" in silent.trajectory.failure
    (cut,), _, _ = play("asks", lambda *_: f"and{CUT}", {"requests": [{}]}, folder="cut")
    assert cut.trajectory.stop == Stop.LENGTH and not cut.finished and cut.trajectory.reward == 1.0
    (dies,), _, _ = play("troubled", lambda *_: f"and{CUT}", {"kind": "raised"}, args={"folder": str(tmp_path)})
    assert dies.trajectory.stop == Stop.LENGTH and dies.trajectory.reward is None and not dies.trajectory.failure
    (own,), _, _ = play("asks", lambda *_: "one two", {"requests": [{"max_tokens": 3}]}, folder="own")
    assert own.trajectory.stop == Stop.DONE and own.response == "one" and len(own.tokens) == 3  # as the agent wanted it


@pytest.mark.slow
def test_a_rollout_made_again_is_the_same_although_the_agent_is_not(play, tmp_path):
    rolls = lambda text, seed: call("roll") if text.count("<tool_call>") < 2 else "so"  # noqa: E731
    seeds = ((5, 6, 7, 8),)
    first, again, other = (play("dice", rolls, seeds=seeds, folder=f) for f in ("run", "run", "other"))
    assert again[0] == first[0] != other[0]
    assert torch.equal(again[1].tokens, first[1].tokens)
    lines = (tmp_path / "run" / "step-00000001-rank-00000.jsonl").read_text().splitlines()
    answers = [json.loads(line.partition(" ")[2])[3]["value"] for line in lines]
    assert len(answers) == 4 * 4 and sum("end" in answer for answer in answers) == 4
    assert all(a["request"]["messages"][0]["content"] == "q" for a in answers if "request" in a)


def test_requests_shorten_an_answer_to_what_they_asked_for(tokenizer):
    dialogue = Dialogue(tokenizer, [])
    dialogue.calls = "hermes"

    def shortened(text, stopped=True, **settings):
        request = ChatRequest("policy", [dict(QUESTION[0])], **settings)
        tokens = tokenizer.encode(text) + ([tokenizer.eos_token_id] if stopped else [])
        return parse_answer(dialogue, request, tokens, stopped, {tokenizer.eos_token_id})

    whole = shortened("one. two")
    assert (whole.text, whole.reason, tokenizer.decode(whole.tokens)) == ("one. two", "stop", "one. two<eos>")
    assert shortened("one. two", stopped=False).reason == "length"
    at = shortened("one. two. three", stop=[". ", "tw"])
    assert (at.text, at.reason, tokenizer.decode(at.tokens)) == ("one", "stop", "one. ")
    most = shortened("one. two", max_tokens=4, stop=["two"])
    assert (most.text, most.reason, len(most.tokens)) == ("one.", "length", 4)
    called = shortened("see " + call("add", a=1))
    assert called.reason == "tool_calls" and message_of(called, 300) == {
        "role": "assistant",
        "content": "see",
        "tool_calls": [{"id": "call00300", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    none = shortened(call("add", a=1), calls=False)
    assert none.reason == "stop" and message_of(none)["content"] == call("add", a=1)
    assert message_of(shortened("<tool_call>{oops</tool_call>"))["content"] == "<tool_call>{oops</tool_call>"


def scripted(*answers):
    left = iter(answers)
    return lambda text, seed: next(left)


@pytest.mark.slow
def test_agents_of_a_framework_run_unchanged(play):
    """`smolagents` sends code back as the model wrote it, calls as text of its own: the row has a further part."""
    pytest.importorskip("smolagents")
    settings = {"longest": 20_000, "max_tokens": 20_000}
    code = scripted("Thought: add.\n<code>\nx = add(a=1, b=2)\n</code>", "<code>\nfinal_answer(x)\n</code>")
    tools = scripted(call("add", a=1, b=2), call("final_answer", answer="3"))
    for agent, script, rows in (("codes", code, 1), ("calls", tools, 2)):
        (sample,), _, _ = play(f"tests/assets/framework_agents.py:{agent}", script, folder=agent, **settings)
        trajectory = sample.trajectory
        assert (trajectory.stop, trajectory.turns, trajectory.reward) == (Stop.DONE, 2, 1.0), trajectory.failure
        assert trajectory.rows == rows


LONG = [{"content": "x" * 200}, {"content": "y" * 3_000_000}, {"content": "z" * (9 << 20)}]


@pytest.mark.slow
@pytest.mark.parametrize("first", LONG, ids=lambda one: str(len(one["content"])))
def test_a_first_request_that_is_too_long_ends_its_trajectory_alone(play, first):
    """The largest is refused by the endpoint, and the agent may still say what that is worth."""
    ask = {"requests": [{"messages": [{"role": "user", **first}]}]}
    samples, *_ = play("asks", lambda text, seed: "fine", row=ask, retries=0)
    trajectory = samples[0].trajectory
    assert not samples[0].tokens and trajectory.turns == 0
    if len(first["content"]) > MAX_REQUEST:
        assert trajectory.stop == Stop.FAILED and "without a request" in trajectory.failure
    else:
        assert trajectory.stop == Stop.PROMPT and "data.max_prompt_tokens=100" in trajectory.failure
    good, *_ = play("asks", lambda text, seed: "fine", row={"requests": [{}]}, folder="good")
    assert good[0].finished and not good[0].trajectory.failure
