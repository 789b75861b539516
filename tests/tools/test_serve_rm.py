"""A reward model over HTTP, asked by reward `http`: the loop is closed."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import httpx
import pytest

from aligner.builders.models import make_reward_model
from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose_over
from aligner.megatron.groups import leave_distributed
from aligner.rewards.http import Http
from aligner.tools.serve_rm import scorer, server
from aligner.types import Prompt, Sample
from tests import stages


@pytest.mark.slow
def test_scores_over_http_are_those_of_the_model(tiny_runs, monkeypatch):
    monkeypatch.chdir(stages.ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    job, answer = scorer(compose_over(load_frozen(tiny_runs["rm"]), [f"run.dir={tiny_runs['rm']}"]))
    try:
        encode = lambda text: tuple(job.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        end = (job.tokenizer.eos_token_id,)
        samples = [
            Sample(Prompt(i, encode("say a:"), "say a:"), 0, text, encode(text) + end, True)
            for i, text in enumerate(("a", "b", "aa", ""))
        ]
        with server(answer, "127.0.0.1", 0) as serving:
            threading.Thread(target=serving.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{serving.server_address[1]}/get_reward"
            scores = Http(url, timeout_s=300, deadline_s=300)(samples)
            bad = [
                httpx.post(url, content=text, timeout=300)
                for text in (b"{", b"[]", b'{"query": []}', b'{"query": ["a"]')
            ]
            long = httpx.post(url, json={"query": ["a " * 100_000]}, timeout=300)
            uneven = httpx.post(url, json={"query": ["a"], "prompts": ["a", "b"]}, timeout=300)
            serving.shutdown()
        assert scores == pytest.approx(make_reward_model(job)(samples), abs=1e-6)
        assert len(set(scores)) > 1
        assert all(reply.status_code == 400 and reply.json()["error"] for reply in [*bad, long, uneven])
        assert "model.max_position" in long.json()["error"] and "one for each query" in uneven.json()["error"]
    finally:
        leave_distributed()


@pytest.fixture
def serving():
    """serving(answer, host) -> the port of a server."""
    made = []

    def start(answer, host="127.0.0.1"):
        made.append(server(answer, host, 0))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return made[-1].server_address[1]

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


def send(port, head, body=b"{}"):
    """The status, and what a server says to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        data = b""
        while extra := connection.recv(1 << 16):
            data += extra
    return int(data.split()[1]), json.loads(data.partition(b"\r\n\r\n")[2])


HOSTS = [
    *(("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:5000", 200), ("[::1]:5000", 200), ("192.0.2.7", 200)),
    *(
        ("evil.example", 421),
        ("evil.example:5000", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
    ),
    *(("", 421), ("node-that-is-not-here", 421), ("2130706433", 421), ("localhost@evil.example", 421)),
]


@pytest.mark.parametrize("host, status", HOSTS)
def test_only_names_of_this_machine_are_answered(serving, host, status):
    """A page in a browser may point its own name here."""
    port = serving(lambda body: {"rewards": [1.0]})
    actual, body = send(port, f"POST /x HTTP/1.0\r\nHost: {host}\r\nContent-Length: 2")
    assert actual == status and ("rewards" if status == 200 else "error") in body


def test_a_server_for_others_has_the_names_of_its_machine(serving):
    port = serving(lambda body: {"rewards": [1.0]}, "0.0.0.0")
    head = "POST /x HTTP/1.0\r\nContent-Length: 2\r\nHost: "
    assert send(port, head + socket.gethostname())[0] == 200 and send(port, head + "evil.example")[0] == 421


@pytest.mark.parametrize("length", ["²", "-1", "", "9" * 5000, "1e3", "٣", str(1 << 40)])
def test_a_length_that_is_none_is_refused(serving, length):
    port = serving(lambda body: {})
    status, body = send(port, f"POST /x HTTP/1.0\r\nHost: localhost\r\nContent-Length: {length}")
    assert status == 413 and "Content-Length" in body["error"]


@pytest.mark.parametrize(
    "answer", [lambda body: {"rewards": [float("nan")]}, lambda body: [][0], lambda body: int("x")]
)
def test_what_goes_wrong_is_one_line(serving, capfd, answer):
    port = serving(answer)
    head = "POST /x HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2"
    assert send(port, head)[0] == 500
    output = capfd.readouterr().err
    assert output.startswith("warning: ") and len(output.splitlines()) == 1


def test_a_client_that_leaves_is_no_event(serving, capfd):
    """While it asks, while it is answered, before it says anything; by an end and by a reset."""
    here, go = threading.Event(), threading.Event()

    def answer(body):
        here.set()
        assert go.wait(120)
        return {"rewards": ["x" * (8 << 20)]}  # more than a socket holds

    port = serving(answer)
    head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
    for sent in (b"", head[:30], head, head + b"{}"):
        for reset in (False, True):
            here.clear(), go.clear()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                if sent.endswith(b"{}"):
                    assert here.wait(120)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            go.set()
    until = time.monotonic() + 120
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
