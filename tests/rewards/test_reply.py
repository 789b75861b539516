"""Servers that harm: by time, by size, by what is no score, by repeating a key. Real sockets."""

from __future__ import annotations

import gc
import gzip
import html
import json
import math
import re
import resource
import socket
import threading
import time
import tracemalloc
import urllib.parse
import zlib

import pytest

from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.servers import EndpointConfig
from aligner.rewards import reply
from aligner.rewards.endpoint import EndpointJudge
from aligner.rewards.http import Http
from aligner.rewards.judge import LAST
from aligner.rewards.reply import Secret
from aligner.types import Prompt, Sample

KEY = 'sk/live"5e1f\\77-aa+z&y'


def packed(data: bytes) -> bytes:
    """The same bytes at any time of day, as tests are named by them."""
    return gzip.compress(data, mtime=0)


class Raw:
    """`talk(connection)` with each client that has sent its request; `heard` are those."""

    def __init__(self, talk):
        self.talk, self.heard, self.left = talk, [], threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/score"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection):
        with connection:
            try:
                data = b""
                while not whole(data):  # what was not read would reset the connection at its end
                    data += connection.recv(1 << 16)
                self.heard.append(data)
                self.talk(connection)
            except OSError:
                self.left.set()  # the client has gone


def whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


@pytest.fixture
def raw():
    made = []

    def start(talk):
        made.append(Raw(talk))
        return made[-1]

    yield start
    for server in made:
        server.socket.close()


def answer(body: bytes, *headers: str, status="200 OK"):
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""])
    return lambda connection: connection.sendall(head.encode() + body)


def dripping(head: bytes, drop: bytes):
    def talk(connection):
        connection.sendall(head)
        while True:
            connection.sendall(drop)
            time.sleep(0.02)

    return talk


def score(url, **settings):
    """Of one sample, with how it failed."""
    reward = Http(url, **{"format": "sample", "retries": 0} | settings)
    (scores,) = reward([Sample(Prompt(0, (1,), "p", {"answer": 1}), 0, "x", (1,), True)])
    causes = [cause for cause, (count, _) in reward.take_counts().items() if count and cause != "retries"]
    return scores, causes, reward.failure()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b" "),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "the status": (b"HTTP/1.1 200 O", b"K"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "a header": (b"HTTP/1.1 200 OK\r\nA: ", b"b"),
    "states before the last": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "nothing that is packed": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 99999\r\n\r\n" + packed(b"")[:10],
        b"\x00\x00\x00\xff\xff",
    ),
}


@pytest.mark.parametrize("what", DRIPS)
def test_bytes_that_drip_extend_no_time(raw, what):
    """A server that never stops: without the clock over all of a request this test has no end."""
    server = raw(dripping(*DRIPS[what]))
    value, causes, failure = score(server.url, timeout_s=0.4)
    assert math.isnan(value) and causes == ["timeout"] and "no answer within 0.4 s" in failure
    assert server.left.wait(120)  # nobody reads on


def test_a_rollouts_deadline_bounds_all_of_it(raw):
    server = raw(dripping(*DRIPS["chunks"]))
    value, causes, _ = score(server.url, timeout_s=600, deadline_s=0.4, retries=9)
    assert math.isnan(value) and causes == ["timeout"] and len(server.heard) == 1


def bomb(size=256 << 20):
    packer = zlib.compressobj(9, wbits=31)
    block, actual = b" " * (1 << 20), b""
    for _ in range(size >> 20):
        actual += packer.compress(block)
    return actual + packer.compress(b"1.0") + packer.flush()


ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("kind", ["packed", "plain", "behind"])
def test_a_reply_without_end_costs_no_more_than_the_limit(raw, kind):
    """256 MiB of blanks and a score, in 256 KiB of gzip; a plain body that goes on; bytes behind the packed ones."""
    many = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    little = packed(b"1.0")
    talk = {
        "packed": answer(bomb(), "Content-Encoding: gzip"),
        "plain": dripping(ENDLESS + b"\r\n", many),
        "behind": dripping(ENDLESS + b"Content-Encoding: gzip\r\n\r\n%x\r\n%b\r\n" % (len(little), little), many),
    }[kind]
    server = raw(talk)
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    value, causes, failure = score(server.url, timeout_s=120, deadline_s=120)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert math.isnan(value) and causes == ["malformed"]
    assert ("bytes behind its end" if kind == "behind" else f"at most {reply.MAX_BYTES} bytes") in failure
    assert peak < 8 * reply.MAX_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10  # KiB: of the unpacker, too


@pytest.mark.parametrize(
    "headers, body, causes",
    [
        (["Content-Encoding: gzip"], packed(b"0.5"), []),
        (["Content-Encoding: deflate"], zlib.compress(b"0.5"), []),
        (["Content-Encoding: identity"], b"0.5", []),
        (["Content-Encoding: gzip"], packed(b"0.5")[:-9], ["malformed"]),
        (["Content-Encoding: gzip"], b"0.5", ["malformed"]),
        (["Content-Encoding: br"], b"0.5", ["malformed"]),
        (["Content-Encoding: gzip, gzip"], packed(packed(b"0.5")), ["malformed"]),
        ([], b"", ["malformed"]),
        ([], b"\xff\xfe", ["malformed"]),
    ],
)
def test_packed_replies_are_unpacked_or_refused(raw, headers, body, causes):
    found, failed, _ = score(raw(answer(body, *headers)).url)
    assert failed == causes and (math.isnan(found) if causes else found == 0.5)


def test_replies_that_are_not_read_to_their_end_leave_nothing_on_the_terminal(raw, caplog):
    many = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    for talk in (
        answer(b"0.5", "Content-Encoding: gzip"),
        dripping(ENDLESS + b"\r\n", many),
        dripping(*DRIPS["chunks"]),
    ):
        for _ in range(3):
            assert math.isnan(score(raw(talk).url, timeout_s=2)[0])
            gc.collect()
    assert not caplog.records


NO_SCORES = [
    *("NaN", "Infinity", "-Infinity", "1e999", "true", "false", "null", '"12"', '"0.5"', "{}", "[]", "[1]", '""'),
    *('{"reward": "1"}', '{"reward": true}', '{"reward": null, "score": 1}', '{"reward": {"a": 1}}', '{"score": [1]}'),
    *('{"reward": 1, "reward": 2}', '{"score": 1, "x": {"a": 1, "a": 1}}', '{"reward": NaN}', '{"score": 1, "b": NaN}'),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "[" * 200, "0x10", "1_000", "+1", "01", ".5", "1 2", "1.0 {}", "1e5000"),
]


@pytest.mark.parametrize("body", NO_SCORES, ids=lambda body: body[:24])
def test_what_is_no_number_is_no_score(raw, body):
    found, causes, failure = score(raw(answer(body.encode())).url)
    assert math.isnan(found) and causes == ["malformed"] and "expected as many finite scores" in failure


@pytest.mark.parametrize(
    "body",
    [
        *('{"rewards": {"0": 1}}', '{"rewards": "1"}', '{"rewards": [true]}', '{"rewards": ["1"]}', "[1]", '"rewards"'),
        *('{"rewards": [[1]]}', '{"rewards": [1, 2]}', '{"rewards": 1}', '{"rewards": [%s]}' % ("9" * 400)),
    ],
)
def test_nor_is_it_in_a_list(raw, body):
    found, causes, _ = score(raw(answer(body.encode())).url, format="openrlhf")
    assert math.isnan(found) and causes == ["malformed"]


def test_many_keys_of_which_one_comes_twice_take_no_time(raw):
    """Looked for one by one they would take hours."""
    names = ",".join(f'"{i}": 0' for i in range(400_000))
    _, causes, _ = score(
        raw(answer(b'{"reward": 1, %b, "399999": 1}' % names.encode())).url, timeout_s=120, deadline_s=120
    )
    assert causes == ["malformed"]


def test_a_server_that_says_nonsense_for_a_while_is_asked_again(raw):
    def talk(connection):
        answer(b"<html>" if len(server.heard) < 3 else b"0.25")(connection)

    server = raw(talk)
    value, causes, _ = score(server.url, retries=3)
    assert (value, causes, len(server.heard)) == (0.25, [], 3)


WRITTEN = {
    "plain": lambda key: key,
    "json": json.dumps,
    "slashes": lambda key: json.dumps(key).replace("/", "\\/"),
    "all escaped": lambda key: "".join(f"\\u{ord(c):04X}" for c in key),
    "json in json": lambda key: json.dumps(json.dumps({"error": f"no {key}"}).replace("/", "\\/")),
    "html": html.escape,
    "numbers of html": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "address": lambda key: urllib.parse.quote(key, safe=""),
    "another case": str.upper,
}


@pytest.mark.parametrize("status", ["200 OK", "500 No", "400 No"])
@pytest.mark.parametrize("how", WRITTEN)
def test_a_key_is_not_shown_however_it_is_written(raw, monkeypatch, how, status):
    monkeypatch.setenv("THE_KEY", KEY)
    message = f"wrong key {WRITTEN[how](KEY)}, said I"
    server = raw(answer(message.encode(), status=status))
    _, causes, failure = score(server.url, key_env="THE_KEY")
    assert causes and "wrong key " in failure and ", said I" in failure and "***" in failure
    assert "5e1f" not in failure.lower() and "5e1f" not in urllib.parse.unquote(failure).lower()
    assert KEY.encode() in server.heard[0]


def test_nor_where_a_protocol_or_a_cut_shows_it(raw, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    for talk in (
        lambda connection: connection.sendall(f"{KEY} is wrong\r\n\r\n".encode()),
        answer(b"1", f"Content-Encoding: {KEY}"),
        answer(f"{'x' * (reply.SHOWN - 9)}{KEY}".encode()),
        answer(f"{KEY}{'x' * (reply.SHOWN - 12)}{KEY}".encode()),
    ):
        value, causes, failure = score(raw(talk).url, key_env="THE_KEY")
        assert math.isnan(value) and causes and "sk/live" not in failure


@pytest.mark.parametrize("key", ["0", "1", ".", '"', "rewards", "e"])
def test_a_short_key_breaks_no_reply(raw, monkeypatch, key):
    monkeypatch.setenv("THE_KEY", key)
    value, causes, _ = score(raw(answer(b'{"rewards": [10.05]}')).url, format="openrlhf", key_env="THE_KEY")
    assert (value, causes) == (10.05, [])


def judge(url, **settings):
    config = {"question": "{response}", "parse": "json"} | settings
    return EndpointJudge(
        JudgeConfig(**config, endpoint=EndpointConfig(base_url=url, model="m", retries=0, key_env="K"))
    )


def test_a_judges_reply_is_read_without_the_key_and_from_its_end(raw, monkeypatch):
    """A long reply of braces is no work: each of them may begin an object."""
    monkeypatch.setenv("K", KEY)
    sample = Sample(Prompt(0, (1,), "q"), 0, "x", (1,), True)
    text = f"{KEY} {'{' * (1 << 20)}" + '{"a":' * (LAST // 8) + '{"score": 7}'
    one = judge(raw(answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())).url)
    kept = []
    one.client._counted, counted = lambda answer: kept.append(answer) or counted(answer), one.client._counted
    assert one([sample]) == [0.7] and "***" in kept[0]["value"] and "5e1f" not in kept[0]["value"]


def test_a_secret_is_taken_out_of_data_where_it_is_one():
    assert Secret("0").kept("10.05") == "10.05" and Secret("0").shown("HTTP 10") == "HTTP 1***"
    assert Secret(KEY).kept(f"a {KEY} b") == "a *** b" and Secret("").shown(b"a") == "a"
