"""The board's server: who knows the token, from this machine, gets pages and answers, and nothing else."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from aligner import __main__ as command_line
from aligner.board.page import asset
from aligner.board.pages import Page
from aligner.board.runs import Board
from aligner.board.server import make_app
from aligner.board.tabs import PAGES
from aligner.errors import MissingExtraError

TOKEN = "secret"


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "runs" / "chain" / "sft"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 0, "sft/loss": 1.5}\n')
    (tmp_path / "secret.txt").write_text("not to be seen")
    return tmp_path / "runs"


def client(folder, pages=PAGES, host="127.0.0.1:8080"):
    return TestClient(make_app(Board([folder]), pages, TOKEN), base_url=f"http://{host}", raise_server_exceptions=False)


def test_pages_assets_and_answers(folder):
    asked = client(folder)
    page = asked.get(f"/{TOKEN}/")
    assert page.status_code == 200 and TOKEN not in page.text and "http:" not in page.text.replace("http-equiv", "")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert asked.get(f"/{TOKEN}/").headers["content-security-policy"] != policy  # a nonce of its own
    for name in ("board.js", "board.css", "uPlot.iife.min.js"):
        assert asked.get(f"/{TOKEN}/assets/{name}").status_code == 200
    content = asked.post(f"/{TOKEN}/api/runs", json={}).json()
    assert [run["name"] for run in content["runs"]] == ["sft"]


def test_all_tabs_have_their_module(folder):
    asked = client(folder)
    for tab in PAGES:
        assert "export function mount" in asked.get(f"/{TOKEN}/assets/{tab}.js").text.replace(
            "export async ", "export "
        )


def test_the_plots_are_of_the_version_that_is_documented():
    documented = (Path(__file__).parents[2] / "docs/reference/dependencies.md").read_text()
    assert "uPlot (v1.6.32)" in asset("uPlot.iife.min.js") and "| uPlot 1.6.32 |" in documented
    assert "MIT" in asset("uPlot.LICENSE")


def test_a_run_whose_name_is_no_unicode_is_shown(folder):
    (folder / "chain" / "sft").rename(folder / "chain" / os.fsdecode(b"r\xff"))
    asked = client(folder)
    (name,) = [run["name"] for run in asked.post(f"/{TOKEN}/api/runs", json={}).json()["runs"]]
    details = asked.post(f"/{TOKEN}/api/details", json={"runs": [name]}).json()["details"]
    assert name == "r\\xff" and details[name]["facts"]["folder"].startswith(str(folder))


def test_without_the_token_nothing_is_there(folder):
    asked = client(folder)
    for token in ("x", TOKEN[:-1], TOKEN + "x", "%C3%A9"):
        for path in ("", "assets/board.js"):
            assert asked.get(f"/{token}/{path}").status_code == 404
        assert asked.post(f"/{token}/api/runs", json={}).status_code == 404
    assert asked.get("/").status_code == asked.get("//").status_code == 404


@pytest.mark.parametrize(
    "name", ["../../secret.txt", "..%2f..%2fsecret.txt", "uPlot.LICENSE", "../runs.py", "%2e%2e/runs.py", "none.js"]
)
def test_no_file_but_the_assets(folder, name):
    answer = client(folder).get(f"/{TOKEN}/assets/{name}")
    assert answer.status_code == 404 and "not to be seen" not in answer.text


def test_only_names_of_this_machine_are_answered(folder):
    for host in ("localhost:1", "127.0.0.1", "localhost"):
        assert client(folder, host=host).get(f"/{TOKEN}/").status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "runs.localhost"):  # rebound to 127.0.0.1
        assert client(folder, host=host).get(f"/{TOKEN}/").status_code == 400


def test_bad_requests_are_reported_in_one_line(folder):
    asked = client(folder)
    for body in (b"{", b"[]", b'{"a": NaN}', b"[" * 10_000, b"\xff"):
        answer = asked.post(f"/{TOKEN}/api/runs", content=body)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]
    assert asked.post(f"/{TOKEN}/api/none", json={}).status_code == 404
    assert asked.get(f"/{TOKEN}/api/runs").status_code == 405
    assert asked.post(f"/{TOKEN}/api/runs", content=b"x" * (5 << 20)).status_code == 413


def test_an_endpoint_may_stream_and_fail_meanwhile(folder):
    def answer(board, asked):
        yield {"part": asked.text("text")}
        board.run("none")

    content = client(folder, {**PAGES, "x": Page({"x": answer})}).post(f"/{TOKEN}/api/x", json={"text": "a\nb"})
    first, last = map(json.loads, content.text.splitlines())
    assert first == {"part": "a\nb"} and "run='none'" in last["error"]


def test_folders_that_are_none_and_a_port_that_is_taken(folder, capsys):
    assert command_line.main(["board", str(folder / "nothing")]) == 2
    assert "nothing': expected a run folder" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert command_line.main(["board", str(folder), "--port", str(port)]) == 2
    assert f"--port={port}: expected a free port (0: any that is)" in capsys.readouterr().err


def test_without_the_server_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"^aligner board needs `starlette`: pip install 'aligner\[serve\]'$"):
        command_line._HANDLERS["board"](command_line.parser().parse_args(["board", str(folder)]))
