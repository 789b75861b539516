"""Folders that somebody else has made, or damaged: each costs its own row, little time, and shows no file of others."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file

from aligner.board import chat, curves, jobs, samples
from aligner.board.runs import Board
from aligner.errors import AlignerError, DataError
from aligner.foreign import record
from aligner.tools.report import main as report
from tests.board.recordings import record as recording
from tests.board.recordings import write_rows
from tests.board.test_curves import ask, make_run, rows

ALL = (curves.table, curves.metrics, curves.curves, curves.phases, curves.details, samples.samples, jobs.jobs)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")
)
RUBBISH = [
    bytes(range(256)) * 50,
    b"",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\0" * 5000,
    b"7",
    b"null\n{}\n[]\n",
    b"\xff\xfe",
]
FILES = ["config.yaml", "metrics.jsonl", "starts.jsonl", "alarms.jsonl", "summary.json", "samples.jsonl", "lock.json"]
FILES += ["logs/attempts.tsv", "logs/board.log", "progress.json", "rollouts/step-00000001.safetensors"]
STARTS = [
    {"started": "2026-01-01T10:00:00+00:00", "versions": {"aligner": "9" * 5000}},
    {"started": {"a": [1]}, "versions": [1], "hardware": "x", "ranks": {"a": 1}, "commit": 7, "command": [1]},
    {"started": 10**400, "ended": "x", "result": {"a": "b" * 10**6}, "versions": {"aligner": {"x": "1.2"}}},
    {"started": "9999-12-31T23:59:59+00:00", "ended": "0001-01-01T00:00:00+00:00", "parameters": 1e999},
]


def both(folder) -> dict:
    """What all endpoints say of a folder of a good run and others, whose good one is whole."""
    answer = {endpoint.__name__: ask(endpoint, folder) for endpoint in ALL}
    good = {row["name"]: row for row in answer["table"]["runs"]}["good"]
    assert (good["step"], good["damage"]) == (5, [])
    assert answer["curves"]["curves"]["good"]["reward/mean"]["y"] == [1, 2, 3, 4, 5]
    assert answer["details"]["details"]["good"]["config"] == "seed: 1\n"
    return answer


@pytest.fixture
def bad(tmp_path):
    make_run(tmp_path / "good")
    folder = make_run(tmp_path / "bad")
    for name in ("logs", "rollouts"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("data", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_costs_its_own_row(tmp_path, bad, name, data):
    (bad / name).write_bytes(data)
    actual = both(tmp_path)
    assert {row["name"] for row in actual["table"]["runs"]} == {"good", "bad"}


@pytest.mark.parametrize("name", ["rollouts", "logs", "checkpoints", "hf"])
def test_a_file_in_place_of_a_folder_costs_its_own_row(tmp_path, bad, name):
    if (bad / name).is_dir():
        (bad / name).rmdir()
    (bad / name).write_text("x")
    assert len(both(tmp_path)["table"]["runs"]) == 2


@pytest.mark.parametrize("start", STARTS)
def test_odd_starts_and_versions_cost_their_own_row(tmp_path, bad, start):
    (bad / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert len(both(tmp_path)["table"]["runs"]) == 2


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN", "true", "[1]", '"1"', "null"])
def test_odd_numbers_of_samples_are_none(tmp_path, bad, value, capsys):
    write_rows(bad, range(2))
    row = f'{{"step": 2, "prompt": "p", "response": "r", "reward": {value}, "advantage": {value}}}\n'
    with (bad / "samples.jsonl").open("a") as file:
        file.write(row)
    (view,) = ask(samples.samples, tmp_path, run="bad")["views"]
    assert [(row["step"], row["reward"], row["advantage"]) for row in view["rows"]] == [
        (2, None, None),
        (1, 1.0, 0.5),
        (0, 0.0, 0.5),
    ]
    assert report([str(bad)]) == 0, capsys.readouterr()


@pytest.mark.parametrize("text", ["{}", "x", "", "[" * 10_000, '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_hides_no_recording(tmp_path, bad, text):
    recording(bad, 1)
    (bad / "hf").mkdir()
    (bad / "hf" / "tokenizer.json").write_text(text)
    (view,) = ask(samples.samples, tmp_path, run="bad", step="1")["views"]
    assert "damage" not in view and view["groups"]
    assert ask(samples.sample_tokens, tmp_path, run="bad", step=1, row=0)["texts"] == ["[60]", "[120]", "[62]", "[32]"]


def test_a_folder_that_is_gone_costs_no_endpoint(tmp_path):
    make_run(tmp_path / "one" / "a")
    make_run(tmp_path / "two" / "b")
    (tmp_path / "two" / "hf").mkdir()
    (tmp_path / "two" / "hf" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    board = Board([tmp_path / "one", tmp_path / "two"])
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    for endpoint in (*ALL, chat.talks):
        json.dumps(endpoint(board, record({}, "the request", AlignerError)))
    assert [run["name"] for run in curves.table(board, record({}, "the request", AlignerError))["runs"]] == ["b"]
    assert chat.talks(board, record({}, "the request", AlignerError))["models"] == [str(tmp_path / "two" / "hf")]


@pytest.mark.parametrize("name", ["\u00b2", "a\u00b2b", "\u2460", "\u0663", "9" * 200, "x\ny", "<b>", "%00", "\u202e"])
def test_odd_names_of_folders_are_names(tmp_path, name):
    make_run(tmp_path / "good")
    make_run(tmp_path / name)
    make_run(tmp_path / "deep" / f"{name}2")
    assert len(both(tmp_path)["table"]["runs"]) == 3


CONFIGS = [
    BOMB,
    "a: &a {b: *a}\n",
    "x: &x {k: 1}\ny: {<<: *x}\n",
    "a: 0x" + "f" * 5000,
    "? [1, 2]\n: 3\n",
    "!!python/object/apply:os.system ['true']",
    "a: !!binary x\n",
    "a: .nan\nb: .inf\nrun: {steps: .inf}\n",
    "run: {steps: [1]}\nstage: {name: {a: b}}\nmodel: {init: 7, tokenizer: [x]}\n",
    "a: " + "[" * 900 + "]" * 900,
    "x: 1\n" * 4_000_000,
    "- " * 10_000_000,
    "k: " + "v" * 20_000_000,
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_no_config_takes_long_or_is_long(tmp_path, bad, config):
    (bad / "config.yaml").write_text(config)
    before = time.process_time()
    actual = both(tmp_path)
    assert time.process_time() - before < 60  # a bomb takes hours, 20 MB a minute
    assert len(json.dumps(actual)) < 3 << 20
    if "*" in config or len(config) > 1 << 20:
        (row,) = (row for row in actual["table"]["runs"] if row["name"] == "bad")
        assert "config.yaml: expected" in row["damage"][0]


SECRET = "root:$6$secret"


@pytest.mark.parametrize("name", [name for name in FILES if name != "lock.json"])
@pytest.mark.parametrize("deep", [False, True])
def test_links_out_of_a_run_are_not_followed(tmp_path, bad, name, deep, capsys):
    """Neither of files nor of their folders; also in a report."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (outside / "logs").mkdir(parents=True)
    (outside / "rollouts").mkdir()
    for each in FILES[:-1]:
        (outside / each).write_text(f'{{"step": 1, "{SECRET}": 1, "prompt": "{SECRET}", "text": "{SECRET}"}}\n')
    recording(outside, 1)
    folder = name.rpartition("/")[0]
    if deep and not folder:
        pytest.skip("not in a folder")
    if deep:
        (bad / folder).rmdir()
        (bad / folder).symlink_to(outside / folder)
    else:
        (bad / name).unlink(missing_ok=True)
        (bad / name).symlink_to(outside / name)
    actual = both(tmp_path)
    assert SECRET not in json.dumps(actual)
    assert report([str(tmp_path)]) == 0
    assert SECRET not in (tmp_path / "report.html").read_text()
    assert report([str(bad)]) == 0 if name != "metrics.jsonl" else True
    assert name == "metrics.jsonl" or SECRET not in (bad / "report.html").read_text()


def test_links_within_a_run_are_followed(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").rename(folder / "config.0.yaml")
    (folder / "config.yaml").symlink_to("config.0.yaml")
    (tmp_path / "link").symlink_to(folder)
    assert ask(curves.details, tmp_path / "link")["details"]["a"]["config"] == "seed: 1\n"


def odd_recordings() -> dict:
    n = np.arange
    return {
        "scores/components/math": n(3.0),
        "trained/rejected": n(2) > 0,
        "lengths": np.full(6, -5),
        "group": np.full(6, np.nan),
        "sample_index": np.full(6, np.inf),
        "response_mask": np.ones((6, 2), np.float32),
        "tokens": np.ones((6, 7, 2), np.int32),
        "trained/advantages": np.ones((1, 1), np.float32),
        "scores/total": np.full(6, np.nan),
    }


@pytest.mark.parametrize("name", odd_recordings())
def test_a_damaged_recording_is_reported_beside_the_rows(tmp_path, bad, name):
    columns = recording(bad, 3) | {name: odd_recordings()[name]}
    path = bad / "rollouts" / "step-00000003.safetensors"
    header = {"format": "aligner-rollout", "version": 1, "slots": [0, 1, 2], "responses": ["r"] * 6}
    header["prompts"] = [{"text": 7}, {"id": [1]}, {}]
    save_file(columns, str(path), {"header": json.dumps(header)})
    write_rows(bad, range(2))
    (view,) = ask(samples.samples, tmp_path, run="bad")["views"]
    assert "damage" not in view or (str(path) in view["damage"] and len(view["rows"]) == 2)
    assert "damage" in view or name in ("group", "lengths", "scores/total", "tokens")
    for row in (0, 5):
        try:
            ask(samples.sample_tokens, tmp_path, run="bad", step=3, row=row)
        except DataError as error:
            assert str(path) in str(error)
    both(tmp_path)


def test_what_was_not_foreseen_costs_its_own_row(tmp_path, bad, monkeypatch):
    real = curves._row
    monkeypatch.setattr(curves, "_row", lambda run, *rest: 1 / 0 if run.name == "bad" else real(run, *rest))
    row = {row["name"]: row for row in both(tmp_path)["table"]["runs"]}["bad"]
    assert row["state"] == "damaged" and "ZeroDivisionError" in row["damage"][0]


def test_metrics_beyond_all_numbers_are_few(tmp_path, bad):
    with (bad / "metrics.jsonl").open("w") as file:
        for i in range(30):
            file.write(json.dumps({"step": i} | {f"x{i}/{k}": 1 for k in range(1000)}) + "\n")
    board = Board([tmp_path], budget=1 << 60)
    row = {row["name"]: row for row in curves.table(board, record({}, "", AlignerError))["runs"]}["bad"]
    assert "expected at most 10000 metrics" in row["damage"][0]


def test_a_lock_of_the_future_says_nothing(tmp_path, bad):
    (bad / "lock.json").write_text("{}")
    os.utime(bad / "lock.json", (time.time() + 10**8,) * 2)
    assert rows(tmp_path)["bad"]["state"] == "ended"


def test_starts_that_failed_are_read_and_say_why(tmp_path):
    """A folder without metrics has nothing left to be read."""
    make_run(tmp_path / "good")
    failed = make_run(tmp_path / "failed")
    (failed / "metrics.jsonl").unlink()
    (failed / "logs").mkdir()
    (failed / "logs" / "failed_start.log").write_text("then\nerror: data.train='x': expected a file\n")
    board = Board([tmp_path])
    by_name = {row["name"]: row for row in curves.table(board, record({}, "", AlignerError))["runs"]}
    assert by_name["failed"]["read"] == 1.0 and by_name["failed"]["result"] == "error: data.train='x': expected a file"


def test_logs_are_the_newest_and_their_ends(tmp_path):
    folder = make_run(tmp_path / "a")
    for age, name in enumerate(
        ["7.1/rank-0001.log", "7.1/rank-0000.log", "board.log", "rank-0001.log", "6.0/rank-0000.log"]
    ):
        (folder / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "logs" / name).write_text(f"{'x' * 10_000}</pre><script>{name}\x1b[31m\n")
        os.utime(folder / "logs" / name, (time.time() - 100 * age,) * 2)
    os.utime(folder / "logs" / "6.0", (1, 1))
    logs = ask(curves.details, tmp_path)["details"]["a"]["logs"]
    assert [*logs] == ["logs/board.log", "logs/7.1/rank-0000.log", "logs/7.1/rank-0001.log"]
    assert all(len(text) == 4000 and text.endswith("\x1b[31m\n") for text in logs.values())
    assert "logs" not in ask(curves.details, tmp_path, report=True)["details"]["a"]


def test_one_evaluation_is_no_metric_that_never_changes(tmp_path):
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, **{"kl/x": 2.0})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 6, "eval/accuracy": 0.5}) + "\n")
    still = {metric["name"]: metric["still"] for metric in ask(curves.metrics, tmp_path)["metrics"]}
    assert still["eval/accuracy"] is None and still["kl/x"] == 2.0
