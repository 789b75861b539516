"""Agents in worker processes, and the endpoint that they talk to, with OpenAI's own client."""

import asyncio
import os
import time
from dataclasses import replace

import httpx
import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.agents import RunningAgent
from aligner.environments.openai_api import MODEL, ChatRequest, Reply, request_sampling
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_agent
from aligner.errors import ConfigError, EnvironmentCodeError
from aligner.types import SamplingParams

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("openai")

FILE = "tests/assets/agents.py"
QUESTION = [{"role": "user", "content": "q"}]
SAMPLING = request_sampling(SamplingParams(8, 0.7)) | {"model": MODEL, "max_tokens": 8}


@pytest.fixture
def pool(tmp_path):
    made = []

    def make(agent, folder="log", step=1, **settings):
        cfg = EnvironmentConfig(workers=1, agent=agent if " " in agent else f"{FILE}:{agent}", **settings)
        log = AnswerLog(tmp_path / folder, 0)
        log.begin(step)
        made.append(Pool(cfg, [], log))
        return made[-1]

    return make


def begin(pool, row=None, key="1"):
    session = Session(key, 7, row or {})
    return session, first(pool, session)


def first(pool, session):
    row = {"seed": session.seed, "row": session.row, "messages": QUESTION, "sampling": SAMPLING}
    return pool.ask(session, "reset", **row).result(300)


def reply(pool, session, event, text="hi", reason="stop", **settings):
    """What the agent does when it is answered so."""
    request = ChatRequest(**event["value"]["request"])
    answer = Reply({"role": "assistant", "content": text} | settings, reason, [1, 2], [3, 4], [-0.5, -1.5], ["h", "i"])
    body = answer.body(request, "chatcmpl-1")
    return pool.ask(session, "turn", digest=event["value"]["digest"], body=body).result(300)


def outcome(requests, pool):
    """What the real client was given for each of the requests, of which those that come through are answered."""
    talking = pool("asks")
    session, event = begin(talking, {"requests": requests})
    while "request" in event["value"]:
        event = reply(talking, session, event)
    return event["value"]["value"]["found"]


@pytest.mark.slow
def test_a_client_is_answered_with_all_that_it_asks_for(pool):
    plain, whole = outcome([{}, {"logprobs": True, "extra_body": {"return_token_ids": True}}], pool)
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert plain["choices"][0]["finish_reason"] == "stop" and plain["model"] == MODEL and plain["created"] > 1e9
    assert plain["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert not plain["choices"][0].get("logprobs") and "prompt_token_ids" not in plain
    assert whole["prompt_token_ids"] == [1, 2] and whole["choices"][0]["token_ids"] == [3, 4]
    reported = whole["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in reported] == [("h", -0.5), ("i", -1.5)]


REFUSED = [
    ({"model": "gpt-9"}, 404, "model", "the only model is `policy`"),
    ({"temperature": 0}, 400, "temperature", "expected 0.7, the run's value"),
    ({"seed": 3}, 400, "seed", "the run sets it"),
    ({"n": 2}, 400, "n", "n=2: expected 1, or none"),
    ({"top_logprobs": 5}, 400, "top_logprobs", "expected 0"),
    ({"tool_choice": "required"}, 400, "tool_choice", "expected auto or none"),
    ({"extra_body": {"best_of": 3}}, 400, "best_of", "best_of=3: expected a request without it"),
    ({"max_tokens": 0}, 400, "max_tokens", "expected a number of tokens >= 1"),
    ({"messages": []}, 400, "messages", "expected a list of messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "expected system, developer"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content", "list of texts"),
    ({"messages": [{"role": "tool", "content": "3", "tool_call_id": 3}]}, 400, "messages[0].tool_call_id", "a text"),
    ({"tools": [{"name": "add"}]}, 400, "tools[0]", "expected a function with a name"),
]


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_by_name(pool):
    actual = outcome([extra for extra, *_ in REFUSED], pool)
    for refused, (_, status, param, words) in zip(actual, REFUSED, strict=True):
        assert refused["status"] == status and refused["error"]["param"] == param
        assert words in refused["error"]["message"] and refused["error"]["code"]
        assert refused["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_nothing_is_at_a_wrong_path_and_bad_json_is_reported(pool):
    talking = pool("address")
    session, event = begin(talking)
    base = event["value"]["request"]["messages"][0]["content"]
    root = base.rpartition("/")[0].rpartition("/")[0]
    ask = {"model": MODEL, "messages": QUESTION}
    assert len(base.split("/")[3]) >= 43 and base.startswith("http://127.0.0.1:")
    with httpx.Client(trust_env=False, timeout=120) as client:
        wrong = [
            client.post(f"{root}/guess/v1/chat/completions", json=ask),
            client.post(f"{root}/v1/chat/completions", json=ask),
            client.post(f"{base}/completions", json=ask),
            client.get(f"{base}/chat/completions"),
            client.get(f"{root}/guess/v1/models"),
        ]
        assert {(reply.status_code, reply.text) for reply in wrong} == {(404, wrong[0].text)}
        assert wrong[0].json()["error"]["code"] == "not_found"
        for text, code in ((b'{"model": ', "invalid_json"), (b"[]", "invalid_value")):
            bad = client.post(f"{base}/chat/completions", content=text)
            assert bad.status_code == 400 and bad.json()["error"]["code"] == code
        reply(talking, session, event)
        talking.forget(session)
        until = time.monotonic() + 120
        while client.get(f"{base}/models").status_code != 404:  # an agent that has ended has no path
            assert time.monotonic() < until


@pytest.mark.slow
def test_templates_get_roles_texts_and_arguments_as_they_know_them(pool):
    call = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c7", "content": "2"},
    ]
    talking = pool("asks")
    _, event = begin(talking, {"requests": [{"messages": messages, "stop": "x", "max_completion_tokens": 3}]})
    request = event["value"]["request"]
    assert request["messages"] == [
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c7", "content": "2", "name": "add"},
    ]
    assert (request["stop"], request["max_tokens"]) == (["x"], 3)


@pytest.mark.slow
def test_an_agent_plays_and_its_answers_are_in_the_log(pool):
    def play(talking):
        session, event = begin(talking)
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        second = reply(talking, session, event, "", "tool_calls", tool_calls=[call])
        return session, [event, second, reply(talking, session, second, "it is 3")]

    live, events = play(pool("calculate"))
    assert live.process is not None
    assert [m["role"] for m in events[1]["value"]["request"]["messages"]] == ["user", "assistant", "tool"]
    assert events[1]["value"]["request"]["messages"][2]["content"] == "3"
    assert events[2]["value"]["end"] == 1.0 and events[2]["value"]["value"]["turns"] == 4
    again, reported = play(pool("calculate"))
    assert again.process is None and reported == events  # to the second on the clock: nobody was asked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raised", "hung", "died"])
def test_what_fails_once_is_begun_again_with_the_answers_so_far(pool, tmp_path, kind):
    args = {"folder": str(tmp_path)}
    talking = pool("troubled", args=args)
    session, event = begin(talking, {"kind": kind})
    second = reply(talking, session, event)
    assert second["retried"] == 1 and "request" in second["value"]
    assert reply(talking, session, second, "four")["value"]["end"] == 4.0
    always = pool("troubled", step=2, args=args | {"fails": 9}, retries=1)
    session, event = begin(always, {"kind": kind})
    failed = reply(always, session, event)
    assert failed["failed"] == kind and failed["retried"] == 1


@pytest.mark.slow
def test_a_result_of_none_is_none_and_what_is_no_result_fails(pool):
    talking = pool("troubled", args={"fails": 0}, retries=0)
    session, event = begin(talking, {"kind": "shy"})
    assert reply(talking, session, reply(talking, session, event))["value"]["end"] is None
    odd = pool("asks", retries=0)
    session, event = begin(odd, {"requests": [{}], "reward": "much"}, key="2")
    assert "TypeError: a reward of 'much'" in reply(odd, session, event)["text"]


@pytest.mark.slow
def test_beyond_a_budget_requests_are_refused_and_the_result_still_counts(pool):
    talking = pool("stubborn")
    for key, row, score in (("1", {"verdict": 0.25}, 0.25), ("2", {}, None)):
        session, event = begin(talking, row, key)
        reply(talking, session, event)
        answer = talking.ask(session, "score", why="no more", code="budget_of_turns").result(300)
        assert answer["value"] == score


@pytest.mark.slow
def test_requests_at_a_time_are_answered_one_after_the_other(pool):
    talking = pool("together")
    session, event = begin(talking)
    asked = []
    for text in ("a", "b", "c"):
        asked.append(event["value"]["request"]["messages"][0]["content"])
        time.sleep(0.2)  # while the trainer holds the request, no clock of the agent runs
        since = time.monotonic()
        event = reply(talking, session, event, text)
        assert event["seconds"] <= time.monotonic() - since
    assert sorted(asked) == ["q0", "q1", "q2"] and event["value"]["end"] == 3.0


def test_a_request_that_comes_while_another_waits_is_late():
    async def play():
        talk = RunningAgent("secret", asyncio.create_task(asyncio.sleep(600)), SAMPLING)
        late, waiting, event = [], [], {}
        for asked in ("ab", "c", "", "d"):
            if late:
                await talk.answer(event["digest"], {})
            for text in asked:
                request = ChatRequest(MODEL, [{"role": "user", "content": text}])
                waiting.append(asyncio.create_task(talk.ask(request)))
            await asyncio.sleep(0)  # they ask
            event = await talk.next()
            late.append(event["late"])
        for task in (talk.program, *waiting):
            task.cancel()
        return late

    assert asyncio.run(play()) == [False, True, True, False]


def test_requests_that_wait_get_their_own_answers_whoever_repeats_them_and_in_whatever_order():
    """Two of three are equal; all are held while their clients repeat them. Then a restarted agent sends the third
    before the one that is answered, and at last another one instead."""

    def request(text, again=False):
        return ChatRequest(MODEL, [{"role": "user", "content": text}], again=again)

    async def play():
        talk = RunningAgent("secret", asyncio.create_task(asyncio.sleep(600)), SAMPLING)
        sends = lambda texts, again=False: [asyncio.create_task(talk.ask(request(t, again))) for t in texts]  # noqa: E731
        first = sends("aab")
        await asyncio.sleep(0)
        repeated, digests = sends("aab", again=True), [one.digest for one in talk.open]
        await asyncio.sleep(0)
        for number in range(3):
            await talk.answer((await talk.next())["digest"], {"n": number})
        heard = [[one["n"] for one in await asyncio.gather(*tasks)] for tasks in (first, repeated)]
        again = RunningAgent("secret", talk.program, SAMPLING)
        (last,) = [asyncio.create_task(again.ask(request("b")))]
        await asyncio.sleep(0)
        assert (await again.next())["digest"] == digests[2] != digests[0]
        answered = asyncio.create_task(again.answer(digests[0], {"n": 0}))
        await asyncio.sleep(0)
        early = asyncio.create_task(again.ask(request("a")))
        await answered
        assert (await early)["n"] == 0 and not last.done()
        await again.answer("of another request", {"n": 5})
        assert (await last)["n"] == 5
        talk.program.cancel()
        return heard

    heard, repeated = asyncio.run(asyncio.wait_for(play(), 60))
    assert heard == [0, 1, 2] and sorted(repeated[:2]) == [0, 1] and repeated[2] == 2


@pytest.mark.slow
@pytest.mark.parametrize("retries", [2, 0])
def test_a_client_that_gives_up_has_asked_once(pool, tmp_path, retries):
    """Answered when it has begun to ask again; or when its agent has died of that, which starts again."""
    (tmp_path / "tries").mkdir()
    talking = pool("impatient", args={"folder": str(tmp_path / "tries"), "retries": retries})
    session, event = begin(talking)
    until = time.monotonic() + 120
    while not (tmp_path / "tries" / "1").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    answer = reply(talking, session, event, "four")
    assert answer["value"]["end"] == 4.0 and answer["retried"] == (retries == 0)


@pytest.mark.slow
def test_a_command_line_is_an_agent_and_leaves_no_process(pool):
    talking = pool(f"python {FILE}")
    session, event = begin(talking)
    answer = reply(talking, session, event, "four")["value"]
    assert answer["end"] == 4.0 and answer["value"]["also"].count("/") == 3  # Anthropic's client adds /v1
    with pytest.raises(ProcessLookupError):
        os.kill(answer["value"]["pid"], 0)
    broken = pool(f"python {FILE} fail", step=2, retries=0)
    session, event = begin(broken)
    assert "exit code 3" in reply(broken, session, event)["text"]


def test_a_stream_is_the_same_answer(pool, tmp_path):
    (tmp_path / "streams.py").write_text(
        "import openai\n"
        "def run(task, base_url, sampling):\n"
        "    client = openai.OpenAI(base_url=base_url, api_key='none')\n"
        "    more = {'stream_options': {'include_usage': True}, 'extra_body': {'return_token_ids': True}}\n"
        "    stream = client.chat.completions.create(messages=task.messages, stream=True, **more, **sampling)\n"
        "    chunks = [chunk.to_dict() for chunk in stream]\n"
        "    return {'reward': 1, 'chunks': chunks, 'models': [m.id for m in client.models.list()]}\n"
    )
    cfg = EnvironmentConfig(workers=1, agent=f"{tmp_path / 'streams.py'}:run")
    log = AnswerLog(tmp_path / "log", 0)
    log.begin(1)
    talking = Pool(cfg, [], log)
    session, event = begin(talking)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    answer = reply(talking, session, event, "so", "tool_calls", tool_calls=[call])["value"]["value"]
    deltas = [choice for chunk in answer["chunks"] for choice in chunk["choices"]]
    reported = call | {"function": {"name": "add", "arguments": "{}"}}
    assert deltas[0]["delta"] == {"role": "assistant"}
    assert deltas[1]["delta"] == {"content": "so", "tool_calls": [{"index": 0, **reported}]}
    assert deltas[1]["token_ids"] == [3, 4] and answer["chunks"][0]["prompt_token_ids"] == [1, 2]
    assert deltas[2]["finish_reason"] == "tool_calls" and answer["chunks"][-1]["usage"]["total_tokens"] == 4
    assert answer["models"] == [MODEL]


def test_bad_agents_are_reported_before_anything_starts():
    for agent, words in {
        f"{FILE}:runs": r"environment\.agent=.*expected a function `runs`",
        "no/such.py:run": r"environment\.agent=.*no file",
        "no-such-program --now": r"environment\.agent=.*`no-such-program` was not found",
        "run": r"environment\.agent='run'.*`run` was not found",
    }.items():
        with pytest.raises(EnvironmentCodeError, match=words):
            load_agent(EnvironmentConfig(agent=agent))
    with pytest.raises(ConfigError, match=r"environment\.agent=.*a command line with path"):
        replace(EnvironmentConfig(agent=f"{FILE}:asks"), path="a.py:B")
