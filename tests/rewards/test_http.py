"""Scores by servers: formats, retries, the breaker, keys, bad answers."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest

from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.errors import RewardError, RewardPathError
from aligner.rewards import client
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.rewards.http import Http
from aligner.types import Prompt, Sample


def samples(count: int, **fields) -> list[Sample]:
    return [Sample(Prompt(i, (1,), f"p{i} ", {"answer": i, **fields}), 0, "x" * i, (1,), True) for i in range(count)]


def test_openrlhf_scores_come_in_the_order_of_the_samples(server):
    """Although later requests answer first."""

    def reply(body):
        time.sleep(0.2 if body["prompts"][0] == "p0 " else 0)
        return 200, {"rewards": [len(q) - len(p) for q, p in zip(body["query"], body["prompts"], strict=True)]}

    server.reply = reply
    assert Http([server.url, server.url])(samples(40)) == [float(i) for i in range(40)]
    assert sorted(len(body["query"]) for body in server.bodies) == [8, 16, 16]
    first = next(body for body in server.bodies if body["prompts"][0] == "p0 ")
    assert first["labels"] == list(range(16)) and first["query"][2] == "p2 xx"


@pytest.mark.parametrize("answer", [lambda n: n, lambda n: {"score": n}, lambda n: {"reward": n, "other": 1}])
def test_one_sample_at_a_time(server, answer):
    server.reply = lambda body: (200, answer(len(body["response"]) + body["label"]))
    assert Http(server.url, format="sample")(samples(5)) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert {"prompt": "p3 ", "response": "xxx", "label": 3} in server.bodies


def test_nemo_gym_is_given_the_row_and_a_response_object(server):
    server.reply = lambda body: (200, {**body, "reward": len(body["response"]["output"][0]["content"][0]["text"])})
    assert Http(server.url, format="verify")(samples(3, options=["a"])) == [0.0, 1.0, 2.0]
    body = next(body for body in server.bodies if body["answer"] == 2)
    assert body["options"] == ["a"] and body["responses_create_params"] == {"input": "p2 "}
    message = body["response"]["output"][0]
    assert body["response"]["object"] == "response" and (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [{"type": "output_text", "text": "xx", "annotations": []}]


def test_what_fails_for_a_while_is_tried_again_as_the_same_request(server, clock):
    server.reply = lambda body: (503, {}) if len(server.bodies) < 3 else (200, 5.0)
    reward = Http(server.url, format="sample")
    assert reward(samples(1)) == [5.0]
    assert len({headers["Idempotency-Key"] for headers in server.headers}) == 1 and len(server.bodies) == 3
    counts = reward.take_counts()
    assert counts["retries"] == (2.0, 1.0) and counts["status"] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "cause", "words"),
    [
        (lambda body: (500, b"out of memory"), "status", "HTTP 500 'out of memory'"),
        (
            lambda body: (200, b"<html>"),
            "malformed",
            "expected as many finite scores as samples in the format sample, found '<html>'",
        ),
        (lambda body: (200, {"rewards": [1]}), "malformed", "found"),
        (lambda body: (200, b"NaN"), "malformed", "NaN"),
        (lambda body: (200, b"[" * 100_000), "malformed", "[[["),
    ],
)
def test_a_failure_is_nan_and_named_never_zero(server, reply, cause, words):
    server.reply = reply
    fails(Http(server.url, format="sample", retries=0), cause, words)
    assert len(server.bodies) == 1


def fails(reward, cause, words):
    (score,) = reward(samples(1))
    assert math.isnan(score) and words in reward.failure() and reward.client.urls[0] in reward.failure()
    assert reward.take_counts()[cause] == (1.0, 1.0)


def test_so_is_a_server_that_does_not_answer(server):
    ended = threading.Event()
    server.reply = lambda body: (ended.wait(120) and 200, 1.0)
    fails(Http(server.url, format="sample", retries=0, timeout_s=0.2), "timeout", "no answer within 0.2 s")
    ended.set()


def test_an_unreachable_server_fails_before_training(server):
    reward = load_function(RewardFunctionConfig(path="http", args={"url": "http://127.0.0.1:9/x", "retries": 0}))
    pipeline = RewardPipeline([(reward, 1.0)], RewardConfig())
    with pytest.raises(RewardError, match=r"probe could not be scored: `http`: unreachable: http://127.0.0.1:9/x"):
        pipeline.probe([sample.prompt for sample in samples(2)])


def test_what_asking_again_cannot_mend_is_an_error_at_once(server):
    server.reply = lambda body: (401, b"wrong key")
    with pytest.raises(RewardError, match="expected HTTP 200, found 401 'wrong key'"):
        Http(server.url, format="sample")(samples(1))
    assert len(server.bodies) == 1


def test_the_breaker_leaves_a_broken_server_alone(server):
    """For longer than there is time."""
    server.reply = lambda body: (500, {})
    reward = Http(server.url, format="sample", retries=0, concurrency=1, deadline_s=client.REST_S)
    assert all(map(math.isnan, reward(samples(20)))) and len(server.bodies) == client.BREAKER
    assert reward.take_counts()["breaker"] == (15.0, 20.0) and "5 failures in a row" in reward.failure()


def test_a_server_that_stumbles_costs_time_and_no_samples(server, clock):
    """Seven failures: after the fifth, and each of the next, the breaker rests."""
    server.reply = lambda body: (503, {}) if len(server.bodies) <= 7 else (200, 1.0)
    reward = Http(server.url, format="sample", concurrency=1, retries=7, deadline_s=9 * client.REST_S)
    assert reward(samples(20)) == [1.0] * 20 and len(server.bodies) == 27
    assert 3 * client.REST_S <= clock.now < 4 * client.REST_S


def test_a_deadline_ends_all_tries(server, clock):
    """Of each sample 51 without it."""
    server.reply = lambda body: (clock.sleep(30) or 503, {})
    reward = Http(server.url, format="sample", retries=50, deadline_s=50, concurrency=1)
    assert all(map(math.isnan, reward(samples(4)))) and len(server.bodies) == 2
    assert "not asked within deadline_s=50" in reward.failure()


def test_a_key_comes_from_the_environment_and_is_told_to_the_server_alone(server, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "secret-key")
    server.reply = lambda body: (500, b"no")
    reward = Http(server.url, format="sample", key_env="REWARD_KEY", retries=0)
    reward(samples(1))
    assert server.headers[0]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in reward.failure() + json.dumps(server.bodies)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"url": "http://h/x", "key_env": "NOT_THERE"},
            "args.key_env='NOT_THERE': expected the name of an environment",
        ),
        ({"url": "localhost:5000"}, "args.url='localhost:5000'"),
        ({"url": []}, "args.url=''"),
        ({"url": "http://me:secret@h/x"}, "args.url='h': expected an address without a user"),
        ({"url": "http://h/x", "format": "xml"}, "args.format='xml': expected one of openrlhf, sample, verify"),
        ({"url": "http://h/x", "deadline_s": 0}, "args.deadline_s=0"),
        ({"url": "http://h/x", "retry": 2}, "args: unknown config key `retry`. Did you mean `retries`?"),
        ({"url": "http://h/x", "requests_per_minute": "many"}, "args.requests_per_minute='many': expected a number"),
        ({}, "missing a required argument: 'url'"),
    ],
)
def test_bad_arguments_are_named(args, words):
    with pytest.raises(RewardPathError) as caught:
        load_function(RewardFunctionConfig(path="http", args=args))
    assert words in str(caught.value) and "secret" not in str(caught.value)
