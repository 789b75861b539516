"""Judges behind OpenAI's chat API; and runs whose scores come from outside: the same bits again, and no key in a
file."""

import json
import math
import shutil
import threading
import time
from itertools import count
from unittest.mock import patch

import pytest

from aligner.answers import AnswerLog
from aligner.config.identity import definition
from aligner.config.options import from_plain
from aligner.config.resolve import compose
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.config.sections.servers import EndpointConfig
from aligner.errors import ConfigError, RewardError
from aligner.rewards import client
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.endpoint import EndpointJudge
from aligner.types import Prompt, Sample
from tests import stages
from tests.servers import Server, fickle, scored_by

KEYS = {"SCORE_KEY": "sk-score-5e1f", "JUDGE_KEY": "sk-judge-77aa"}


@pytest.fixture
def server(monkeypatch):
    for name, value in (KEYS | {"NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    made = Server(fickle).start()
    yield made
    made.close()


def says(text):
    """A server's reply with `text(question)` in it."""
    return lambda body: (200, {"choices": [{"message": {"content": text(body["messages"][0]["content"])}}]})


def judge(server, endpoint=None, **settings):
    at = {"base_url": f"{server.base_url}/v1/", "model": "big", "retries": 0}
    return EndpointJudge(
        JudgeConfig(**{"question": "{response}", **settings}, endpoint=EndpointConfig(**at | (endpoint or {})))
    )


def samples(*responses, seed=None):
    """Of one group."""
    prompt = Prompt(0, (1,), "q")
    return [
        Sample(prompt, i, text, (1,), True, seed=None if seed is None else seed + i) for i, text in enumerate(responses)
    ]


def test_a_question_is_a_users_turn_of_a_chat_completion(server):
    server.reply = says(lambda text: "8")
    one = judge(server, {"key_env": "JUDGE_KEY"}, question="How good is {response}?", max_tokens=5)
    assert one(samples("it")) == [0.8]
    turn = {"role": "user", "content": "How good is it?"}
    assert server.bodies == [{"model": "big", "max_tokens": 5, "temperature": 0.0, "messages": [turn]}]
    assert server.headers[0]["Authorization"] == "Bearer sk-judge-77aa"


@pytest.mark.parametrize(
    ("parse", "reply", "score"),
    [
        ("json", 'Well: {"a": 1} {"score": 7, "why": "{"}', 0.7),
        ("json", '```json\n{"score": "4.5"}\n```', 0.45),
        ("json", '{"score": -3}', 0.0),
        ("json", '{"score": NaN}', None),
        ("json", '{"score": true} [1]', None),
        ("json", '{"score": ' + '{"a":' * 5000, None),
        ("json", "seven", None),
        ("yesno", "No, wait. YES.", 1.0),
        ("yesno", "yes or no? No", 0.0),
        ("yesno", "nothing", None),
        ("regex", "3 of 10, no: 9", 0.9),
        ("regex", None, None),
    ],
)
def test_what_counts_of_a_reply(server, parse, reply, score):
    server.reply = says(lambda text: reply)
    one = judge(server, parse=parse)
    assert one(samples("x")) == [score] and one.take_counts()["unread"] == (float(score is None), 1.0)


def test_pairs_in_json_and_a_member_of_ones_own(server):
    server.reply = says(
        lambda text: json.dumps({"better": "A" if len(text.split()[0]) > len(text.split()[1]) else "B"})
    )
    one = judge(server, parse="json", pattern="better", kind="pairwise", question="{first} {second}", opponents=0)
    assert one(samples("xx", "x", "xxx")) == [0.5, 0.0, 1.0] and len(server.bodies) == 6


def test_votes_are_averaged_and_none_is_another_ones_reply(server):
    """A server may take requests of one idempotency key for one."""
    replies = iter(["2", "4", "9", "what?"])
    server.reply = says(lambda text: next(replies))
    one = judge(server, {"temperature": 1, "concurrency": 1}, votes=4)
    assert one(samples("x")) == [pytest.approx(0.5)]
    assert len({headers["Idempotency-Key"] for headers in server.headers}) == 4


def test_what_fails_is_nan_and_no_tie(server):
    server.reply = lambda body: (500, {}) if "bad" in body["messages"][0]["content"] else says(lambda t: "A")(body)
    one = judge(server, {"concurrency": 1}, kind="pairwise", question="{first} {second}")
    good, also, bad = one(samples("good", "also", "bad"))
    assert (good, also) == (0.5, 0.5) and math.isnan(bad) and "HTTP 500" in one.failure()
    server.reply = lambda body: (200, {"choices": []})
    assert math.isnan(judge(server)(samples("x"))[0])
    server.reply_headers = {"Content-Encoding": "gzip"}
    assert math.isnan(judge(server)(samples("x"))[0])
    here, ended = threading.Event(), threading.Event()
    server.reply_headers, server.reply = {}, lambda body: (here.set() or (ended.wait(120) and 200), {})
    late = judge(server, {"timeout_s": 0.2})
    assert math.isnan(late(samples("x"))[0]) and late.take_counts()["timeout"] == (1.0, 1.0)
    assert here.wait(120)  # else it would count among the next ones
    server.reply = lambda body: (400, {"error": "too long"})
    refused = judge(server, {"retries": 5})
    before = len(server.bodies)
    assert math.isnan(refused(samples("x"))[0]) and len(server.bodies) == before + 1
    ended.set()
    assert refused.take_counts()["refused"] == (1.0, 1.0)


def test_rates_hold_requests_back(server):
    """Sixty a second at most: of ten the last leaves nine slots after the first. Tokens: sent ones, and a reply's."""
    server.reply = says(lambda text: "1")
    begun = time.monotonic()
    judge(server, {"requests_per_minute": 3600})(samples(*"abcdefghij"))
    assert time.monotonic() - begun > 0.149
    begun = time.monotonic()
    judge(server, {"tokens_per_minute": 600_000}, max_tokens=1000)(samples("a", "b"))
    assert time.monotonic() - begun > 0.1
    slow = judge(server, {"requests_per_minute": 1, "deadline_s": 59})
    one, other = slow(samples("a", "b"))
    assert sorted([one, other], key=math.isnan)[0] == 0.1 and math.isnan(one) != math.isnan(other)
    assert "not asked within deadline_s=59" in slow.failure()


def test_a_server_may_say_when_to_come_again(server, clock):
    def reply(body):
        return (429, {}) if len(server.bodies) == 1 else says(lambda text: "10")(body)

    server.reply, server.reply_headers = reply, {"Retry-After": "7"}
    assert judge(server, {"retries": 1})(samples("a")) == [1.0] and clock.now == 7


def test_answers_are_read_before_anyone_is_asked(server, tmp_path):
    """Failures, too; those of a rollout that is given up are asked again."""

    def pipeline(step=1):
        server.reply = lambda body: (500, {}) if body["messages"][0]["content"] == "bad" else fickle_grade(body)
        one = judge(server, {"temperature": 1}, votes=2)
        made = RewardPipeline([(one, 1.0)], RewardConfig(), answers=AnswerLog(tmp_path, 0))
        made.begin(step)
        return made

    numbers = count()
    fickle_grade = says(lambda text: str(2 ** (next(numbers) % 4)))  # no two pairs of four have one mean
    asked = samples("a", "a", "bad", seed=7)
    first = pipeline()
    scores, counts = first.functions(asked)["judge"], first.take_late()
    assert len(server.bodies) == 6 and scores[0] != scores[1] and math.isnan(scores[2])
    again = pipeline()
    actual = again.functions(asked)["judge"]
    assert actual[:2] == scores[:2] and math.isnan(actual[2]) and again.take_late() == counts
    assert len(server.bodies) == 6
    again.forget_failures()
    assert pipeline().functions(asked)["judge"][:2] == scores[:2] and len(server.bodies) == 8
    pipeline(step=2).functions(asked)
    assert len(server.bodies) == 14  # another rollout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parse": "xml"}, "parse='xml'"),
        ({"parse": "yesno", "kind": "pairwise", "question": "{first}{second}"}, "parse='yesno'"),
        ({"votes": 3}, r"votes=3: expected 1 without .*temperature"),
        ({"endpoint": {"base_url": "http://h/v1"}}, r"endpoint.model='': expected the model's name"),
        ({"model": "m", "endpoint": {"base_url": "http://h", "model": "m"}}, "model='m': expected empty"),
        ({"endpoint": {"retries": -1}}, r"endpoint.retries=-1"),
        ({"question_file": "q.txt"}, "question_file='q.txt': expected empty with question"),
    ],
)
def test_contradicting_judge_keys_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_plain(JudgeConfig, {"question": "{response}", **change})


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (
            {"base_url": "localhost:80", "model": "m"},
            r"reward.judges.judge.endpoint.url='localhost:80/chat/completions'",
        ),
        ({"base_url": "http://h/v1", "model": "m", "key_env": "NO_SUCH"}, r"judge.endpoint.key_env='NO_SUCH'"),
        ({"base_url": "http://h/v1", "model": "m", "key_env": "BAD_KEY"}, r"key_env='BAD_KEY': .*printable ASCII"),
        ({"base_url": "http://h/v1", "model": "m", "deadline_s": 60}, r"deadline_s=60.*less than reward.timeout_s=60"),
        (
            {"base_url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0},
            r"the probe .*unreachable: http://127.0.0.1:9",
        ),
    ],
)
def test_bad_endpoints_end_the_start(tiny_data, tmp_path, monkeypatch, endpoint, message):
    monkeypatch.setenv("BAD_KEY", "hidden\x07key")
    fields = ", ".join(
        f"{name}: '{value}'" if isinstance(value, str) else f"{name}: {value}" for name, value in endpoint.items()
    )
    asked = f"reward.judges=[{{question: '{{response}}', endpoint: {{{fields}}}}}]"
    with pytest.raises((ConfigError, RewardError), match=message) as caught:
        stages.stage("grpo", tiny_data, tmp_path / "run", asked)
    assert "hidden" not in str(caught.value)


def test_a_question_in_a_file(tiny_data, tmp_path, server):
    server.reply, path = says(lambda text: "5"), tmp_path / "question.txt"
    path.write_text("Grade:\n{response}")
    one = judge(server, question="", question_file=str(path))
    assert one(samples("x")) == [0.5] and server.bodies[0]["messages"][0]["content"] == "Grade:\nx"
    path.write_text("Grade it.")
    with pytest.raises(ConfigError, match=r"question_file=.*a text with \{response\}"):
        stages.stage("grpo", tiny_data, tmp_path / "run", f"reward.judges=[{{question_file: {path}}}]")


def test_what_makes_a_judge_another_one():
    """Not where it is, nor how it is queried."""

    def at(**endpoint):
        known = {"base_url": "http://a/v1", "model": "m", "temperature": 1.0} | endpoint
        cfg = compose(["stage=grpo"])
        cfg.reward.judges = [from_plain(JudgeConfig, {"question": "{response}", "votes": 2, "endpoint": known})]
        return definition(cfg, {})

    assert at() == at(base_url="http://b/v1", key_env="KEY", retries=9, requests_per_minute=5.0)
    assert at() != at(model="n") and at() != at(temperature=0.5)


SMALL = ["run.steps=3", "batch.prompts=4", "checkpoint.every=1", "checkpoint.rollouts=false"]


@pytest.fixture
def short_rest(monkeypatch):
    monkeypatch.setattr(client, "REST_S", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("short_rest")
def test_a_killed_run_resumes_with_the_scores_that_it_was_given(tiny_data, tmp_path, server):
    """Scores and grades are other ones each time, some fail. What a resumed run is made of is in its log: a run that
    reads all of it is the same to the last bit. No file has a key."""
    overrides = [*SMALL, *scored_by(server.base_url)]
    with patch("aligner.answers.AnswerLog.drop"):  # `again` goes through all of them, which has no checkpoint
        with pytest.raises(stages.PowerCut), stages.power_cut_in_update(2):
            stages.stage("grpo", tiny_data, tmp_path / "killed", *overrides)
        asked = len(server.bodies)
        killed = stages.stage("grpo", tiny_data, tmp_path / "killed", *overrides)
    assert len(server.bodies) < asked * 2  # the second rollout's were there
    shutil.copytree(killed / "answers", tmp_path / "again" / "answers")
    again = stages.stage("grpo", tiny_data, tmp_path / "again", *overrides)
    assert stages.same_weights(killed, again) and not stages.differences(killed, again)
    other = stages.stage("grpo", tiny_data, tmp_path / "other", *overrides)
    assert stages.differences(killed, other)
    used = {headers.get("Authorization", "").removeprefix("Bearer ") for headers in server.headers}
    assert used == set(KEYS.values())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 30 and not [p for p in files for key in used if key.encode() in p.read_bytes()]


@pytest.mark.slow
@pytest.mark.usefixtures("short_rest")
def test_a_server_that_breaks_stops_the_run_which_goes_on_when_it_is_mended(tiny_data, tmp_path, server):
    """After a save; what failed is not read from the log then. The server shows the key in its error."""
    broken = [False]

    def reply(body):
        if broken[0] and "messages" in body:
            return 500, f"no room for {KEYS['JUDGE_KEY']}".encode()
        broken[0] = broken[0] or len(server.bodies) > 60
        return (200, 0.5) if "messages" not in body else says(lambda text: "5")(body)

    server.reply = reply
    overrides = [*SMALL, *scored_by(server.base_url), "reward.max_invalid_fraction=0.02"]
    with pytest.raises(
        RewardError, match=r"could not be scored: expected at most reward.max_invalid_fraction=0.02"
    ) as caught:
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    assert "`judge`: " in str(caught.value) and KEYS["JUDGE_KEY"] not in str(caught.value)
    saved = stages.checkpoints(tmp_path / "run")
    assert saved and saved[-1] < 3
    server.reply = lambda body: (200, 0.5) if "messages" not in body else says(lambda text: "5")(body)
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    assert [record["step"] for record in stages.records(run)] == [1, 2, 3]
    assert not any(key.encode() in p.read_bytes() for p in run.rglob("*") if p.is_file() for key in KEYS.values())
