"""What the board tells of run folders: whole ones, running ones, and those that are damaged, empty or of the future."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.board import curves
from aligner.board.runs import Board
from aligner.board.series import Series
from aligner.errors import AlignerError, ConfigError
from aligner.foreign import record
from aligner.run.metrics import append_jsonl

START = {"started": "2026-01-01T10:00:00+00:00", "commit": "0123456789abcdef", "dirty": True, "host": "node7"}
START |= {"parameters": 596_049_920, "versions": {"torch": "2.13"}, "hardware": {"cpu": "C", "gpu": "H200"}, "ranks": 8}


def write(path: Path, *records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def make_run(folder: Path, steps=5, scale=1.0, config="seed: 1\n", **metrics) -> Path:
    rows = [{"step": i, "wall_time": 100.0 + i, "reward/mean": scale * i, **metrics} for i in range(1, steps + 1)]
    write(folder / "metrics.jsonl", *rows)
    (folder / "config.yaml").write_text(config)
    return folder


def ask(endpoint, *folders, **asked):
    board = Board([*folders], budget=1 << 60)
    board.look([*board.runs().values()])
    answer = endpoint(board, record(asked, "the request", AlignerError))
    return json.loads(json.dumps(answer, allow_nan=False))


def rows(*folders) -> dict:
    return {row["name"]: row for row in ask(curves.table, *folders)["runs"]}


def test_runs_are_found_in_folders_of_folders_and_named_apart(tmp_path):
    for location in ("sweep/0_a", "sweep/10_a", "sweep/2_a", "chain/sft", "chain/grpo", "sft"):
        make_run(tmp_path / location)
    make_run(tmp_path / "sft" / "inner")  # a run's own folders are not runs
    (tmp_path / "sweep" / "logs").mkdir()
    (tmp_path / "around").symlink_to(tmp_path)
    make_run(tmp_path / ".trash" / "old")
    inside = ["chain/grpo", "chain/sft", "sft", "sweep/0_a", "sweep/2_a", "sweep/10_a"]
    assert [*rows(tmp_path)] == [f"{tmp_path.name}/{name}" if name == "sft" else name for name in inside]
    assert [*rows(tmp_path / "sweep")] == ["0_a", "2_a", "10_a"]
    assert [*rows(tmp_path / "chain" / "sft", tmp_path / "sft")] == ["chain/sft", f"{tmp_path.name}/sft"]
    assert [*rows(tmp_path / "sft", tmp_path / "sft")] == ["sft"]


def test_no_runs_and_folders_that_are_none(tmp_path):
    assert ask(curves.table, tmp_path) == {"folders": [str(tmp_path)], "headline": [], "runs": []}
    assert (
        ask(curves.details, tmp_path) == {"details": {}, "differ": {}, "summary": {}}
        and ask(curves.metrics, tmp_path)["metrics"] == []
    )
    with pytest.raises(ConfigError, match=r"nothing'.*a run folder, or a folder of runs"):
        Board([tmp_path / "nothing"])


def test_a_name_is_no_path(tmp_path):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "other")
    for name in ("../other", str(tmp_path / "other"), "other", "a/../../other", ""):
        assert ask(curves.curves, tmp_path / "runs", runs=[name]) == {"curves": {}, "clocks": {}}
        with pytest.raises(AlignerError, match="expected one of the board's 1 runs"):
            Board([tmp_path / "runs"]).run(name)


def test_a_row_says_how_a_run_goes(tmp_path):
    sft = make_run(tmp_path / "sft", config="stage: {name: sft}\nrun: {steps: 5}\n")
    (sft / "DONE").touch()
    config = (
        f"stage: {{name: grpo}}\nrun: {{steps: 20}}\nmodel: {{init: {sft}/hf}}\nreward: {{model: {tmp_path}/none}}\n"
    )
    speed = {
        "time/step_s": 2.0,
        "throughput/tokens_per_s": 50.0,
        "memory/peak_rss_bytes": 7.0,
        "memory/update_peak_bytes": 9,
    }
    grpo = make_run(tmp_path / "grpo", config=config, **speed)
    (grpo / "lock.json").write_text("{}")
    append_jsonl(grpo / "alarms.jsonl", [{"step": 1, "text": "alarm"}])
    write(grpo / "starts.jsonl", {**START, "started": "1970-01-01T00:01:30+00:00"})
    read = rows(tmp_path)
    row = read["grpo"]
    assert (row["stage"], row["state"], row["step"], row["steps"], row["alarms"]) == ("grpo", "running", 5, 20, 1)
    assert (row["step_s"], row["tokens_per_s"], row["peak_bytes"], row["left_s"]) == (2.0, 50.0, 9, 30.0)
    assert (
        row["from"] == {"model.init": "sft"} and row["chain"] == tmp_path.name and row["last"] == {"reward/mean": 5.0}
    )
    assert row["goodput"] == pytest.approx(10 / 15)  # 5 steps of 2 s, from 90 s to 105 s
    assert (read["sft"]["state"], read["sft"]["from"], read["sft"]["left_s"]) == ("DONE", {}, None)
    old = time.time() - 3600
    os.utime(grpo / "lock.json", (old, old))
    assert rows(grpo)["grpo"]["state"] == "ended"
    assert rows(grpo)["grpo"]["result"] == "no end recorded: running, or killed"


def test_stages_of_a_chain_come_as_they_started(tmp_path):
    for name, started in (("grpo", "2026-01-03"), ("new", None), ("rm", "2026-01-02"), ("sft", "2026-01-01")):
        folder = make_run(tmp_path / name)
        write(folder / "starts.jsonl", *([{**START, "started": f"{started}T10:00:00+00:00"}] if started else []))
    assert [*rows(tmp_path)] == ["sft", "rm", "grpo", "new"]


def test_a_batch_job_has_the_queues_state_and_its_own_goodput(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "a", **{"time/step_s": 10.0})
    (folder / "logs").mkdir()
    (folder / "logs/attempts.tsv").write_text(
        "start\t7\t0\t1000\t0\t-\t8\nend\t7\t0\t1100\t5\tx\t8\nstart\t7\t1\t1200\t4\t-\t8\n"
    )
    board, asked = Board([tmp_path]), record({}, "", AlignerError)
    monkeypatch.setattr("aligner.board.runs.watch.queue", lambda: {"7": "PENDING"})
    assert curves.table(board, asked)["runs"][0]["state"] in ("ended", "PENDING")  # nobody waits for the queue
    while not board.jobs():
        time.sleep(0.01)
    row = curves.table(board, asked)["runs"][0]
    assert (row["state"], row["job"]) == ("PENDING", "7") and row["goodput"] == pytest.approx(50 / 100)


def test_the_page_follows_a_run_that_writes(tmp_path):
    folder = make_run(tmp_path / "a")
    board, asked = Board([tmp_path]), record({}, "", AlignerError)
    assert curves.table(board, asked)["runs"][0]["step"] == 5
    append_jsonl(folder / "metrics.jsonl", [{"step": 6, "reward/mean": 9.0}])
    make_run(tmp_path / "b")
    assert [row["step"] for row in curves.table(board, asked)["runs"]] == [6, 5]
    assert curves.curves(board, asked)["curves"]["a"]["reward/mean"]["y"] == [1, 2, 3, 4, 5, 9]
    (tmp_path / "b" / "metrics.jsonl").unlink()
    (tmp_path / "b" / "config.yaml").unlink()
    assert [row["name"] for row in curves.table(board, asked)["runs"]] == ["a"]
    assert curves.details(board, record({"runs": ["a", "b"]}, "", AlignerError))["differ"] == {}


def test_one_request_at_a_time_reads_what_runs_wrote(tmp_path, monkeypatch):
    make_run(tmp_path / "a")
    inside, most = [], []

    def look(series, budget, real=Series.look):
        inside.append(series)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return real(series, budget)

    monkeypatch.setattr(Series, "look", look)
    board, asked = Board([tmp_path]), record({}, "", AlignerError)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(endpoint, board, asked) for endpoint in (curves.table, curves.metrics) * 4]
        assert all(answer.result() for answer in answers)
    assert most == [1] * 8


def test_damaged_folders_are_rows_that_say_so(tmp_path):
    folder = make_run(tmp_path / "broken")
    (folder / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"st\n{"step": 3, "a": 2}\n')
    (folder / "config.yaml").write_text("a: [")
    (folder / "starts.jsonl").write_text('{"started": "yesterday", "versions": 3}\nx\n{"started": null}\n')
    (folder / "alarms.jsonl").write_bytes(b"\xff\n{}\n")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_bytes(b"\x00\xff")
    write(tmp_path / "odd" / "metrics.jsonl", {"step": 1}, {"step": 2, "rm/loss": [1], "kl/x": "a"})
    write(tmp_path / "odd" / "starts.jsonl", {"started": "yesterday", "versions": 3}, {"started": None, "hardware": 1})
    write(tmp_path / "odd" / "alarms.jsonl", {}, {"step": "x", "text": 3})
    (tmp_path / "odd" / "config.yaml").write_text("- 1\n- stage: 2\n")
    details = ask(curves.details, tmp_path)["details"]
    read = rows(tmp_path)
    assert len(read) == 3 and read["broken"]["step"] == 3
    damage = "\n".join(details["broken"]["damage"])
    assert "metrics.jsonl:2" in "".join(read["broken"]["damage"])
    for name in ("config.yaml", "starts.jsonl:2", "alarms.jsonl"):
        assert name in damage
    assert all("\n" not in text for text in details["broken"]["damage"])
    assert details["half"]["damage"][0].startswith("config.yaml: ") and read["half"]["state"] == "not started"
    assert details["odd"]["damage"] == [] and [alarm["text"] for alarm in details["odd"]["alarms"]] == ["", "3"]
    for endpoint in (curves.metrics, curves.curves, curves.phases):
        ask(endpoint, tmp_path)
    (folder / "config.yaml").write_text("a: 1")
    assert not any("config" in text for text in ask(curves.details, tmp_path)["details"]["broken"]["damage"])


STEP = b'{"step": %d, "wall_time": 1, "time/step_s": %s, "throughput/tokens_per_s": %s}\n'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.yaml", b"a: 2026-13-45\n"),
        ("config.yaml", b"a: 1" + b"0" * 5000),
        ("logs/attempts.tsv", b"\n"),
        ("logs/attempts.tsv", b"start\t7\t0\t1000\t0\t-\t8\nend\t7\t0\tx\t0\t-\t8\nend\t7"),
        ("logs/attempts.tsv", b"\xff\xfe"),
        ("metrics.jsonl", STEP % (5, b"1", b"1") + STEP % (1, b"1", b"1")),
        ("metrics.jsonl", STEP % (2**31 - 1, b"1", b"1") + STEP % (1 - 2**31, b"1", b"1")),
        ("metrics.jsonl", b"".join(STEP % (i, b"1e308", b"1e308") for i in range(3))),
    ],
)
def test_no_file_of_one_run_takes_the_others_away(tmp_path, name, data):
    make_run(tmp_path / "good")
    (make_run(tmp_path / "bad") / "logs").mkdir()
    (tmp_path / "bad" / name).write_bytes(data)
    (tmp_path / "bad" / "lock.json").write_text("{}")  # it runs: the time that is left is told, too
    for endpoint in (curves.table, curves.metrics, curves.curves, curves.phases, curves.details):
        assert "good" in json.dumps(ask(endpoint, tmp_path)) or endpoint is curves.phases


def test_pipes_are_not_waited_for(tmp_path):
    pipes = [make_run(tmp_path / "a") / "metrics.jsonl", tmp_path / "a" / "starts.jsonl"]
    pipes.append(make_run(tmp_path / "b") / "config.yaml")
    for path in pipes:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(lambda: (rows(tmp_path), ask(curves.details, tmp_path)["details"]))
        try:
            answer, details = asked.result(120)
        finally:
            for path in pipes * 3:  # a reader that waits goes on
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    assert (answer["a"]["step"], answer["b"]["step"], details["b"]["config"]) == (None, 5, "")


def test_steps_that_were_taken_again_count_once_along_the_run(tmp_path):
    write(tmp_path / "a" / "metrics.jsonl", *({"step": step, "time/update_s": 1.0} for step in (1, 2, 3, 2, 3, 4)))
    answer = ask(curves.phases, tmp_path)["phases"]["a"]
    assert (answer["x"], answer["seconds"]) == ([1, 2, 3, 4], {"time/update_s": 6.0})
    assert answer["layers"] == {"time/update_s": [1, 1, 3, 1]}


def test_a_run_of_a_newer_version_is_shown_and_said_to_be_one(tmp_path):
    folder = make_run(
        tmp_path / "a", config="stage: {name: telepathy}\nbrain: {waves: {alpha: 3}}\n", **{"brain/waves": 3.0}
    )
    write(folder / "starts.jsonl", {**START, "versions": {"aligner": "99.1.0"}, "mood": ["good"]})
    row = rows(tmp_path)["a"]
    assert row["stage"] == "telepathy" and "written by aligner 99.1.0" in row["damage"][0]
    assert "brain/waves" in [metric["name"] for metric in ask(curves.metrics, tmp_path)["metrics"]]
    write(folder / "starts.jsonl", {**START, "versions": {"aligner": "0.0.1"}})
    assert rows(tmp_path)["a"]["damage"] == []


def test_facts_and_the_keys_in_which_configs_differ(tmp_path):
    a = make_run(tmp_path / "a", config="seed: 12345\nmodel: {family: qwen3}\noptim: {lr: 0.5, eps: 3}\nlist: [1, 2]\n")
    make_run(
        tmp_path / "b", config="seed: 12345\nmodel: {family: qwen3}\noptim: {lr: 0.25, eps: 3}\nlist: [1]\nmore: x\n"
    )
    again = {**START, "started": "2026-01-01T11:00:00+00:00", "dirty": False, "command": "aligner run a=1"}
    ends = {"ended": "2026-01-01T10:00:40+00:00", "result": "StopRequested: USR1"}
    write(a / "starts.jsonl", START, ends, again, {"ended": "2026-01-01T12:01:00+00:00", "result": "done"})
    answer = ask(curves.details, tmp_path)
    assert answer["differ"] == {
        "optim.lr": {"a": "0.5", "b": "0.25"},
        "list": {"a": "[1, 2]", "b": "[1]"},
        "more": {"b": "x"},
    }
    facts = answer["details"]["a"]["facts"]
    wanted = {
        "seed": "12345",
        "model": "qwen3",
        "parameters": 596_049_920,
        "duration": 3700.0,
        "starts": 2,
        "host": "node7",
    }
    wanted |= {
        "hardware": "H200",
        "commit": "0123456789ab",
        "versions": "torch 2.13",
        "command": "aligner run a=1",
        "ranks": "8",
    }
    assert wanted.items() <= facts.items()
    (tmp_path / "summary.json").write_text('{"sft": {"accuracy": 0.375}, "nan": NaN}')
    assert ask(curves.details, tmp_path)["summary"] == {"sft.accuracy": 0.375, "nan": "nan"}
    assert "lr: 0.5" in answer["details"]["a"]["config"]


def test_metrics_that_never_change_say_their_value(tmp_path):
    for name, value in (("a", 0.25), ("b", 0.25)):
        make_run(tmp_path / name, **{"policy/same": value, "policy/none": None, "time/x_s": 1.0, "zoo/z": 1.0})
    make_run(tmp_path / "c", **{"zoo/z": 2.0})
    answer = ask(curves.metrics, tmp_path)["metrics"]
    still = {metric["name"]: metric["still"] for metric in answer}
    assert still == {"reward/mean": None, "policy/same": 0.25, "zoo/z": None, "time/x_s": 1.0}
    assert [metric["name"] for metric in answer] == ["reward/mean", "policy/same", "zoo/z", "time/x_s"]  # by group
    assert answer[2]["last"] == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_curves_have_every_step_and_each_clock(tmp_path, monkeypatch):
    speed = {"time/step_s": 2.0, "throughput/tokens_per_s": 50.0}
    folder = make_run(tmp_path / "a", **speed)
    append_jsonl(folder / "metrics.jsonl", [{"step": 6, "wall_time": 200.0, "reward/mean": None, **speed}])
    answer = ask(curves.curves, tmp_path, metrics=["reward/mean", "none/such"])
    assert answer["curves"] == {"a": {"reward/mean": {"x": [1, 2, 3, 4, 5, 6], "y": [1, 2, 3, 4, 5, None]}}}
    clocks = answer["clocks"]["a"]
    assert clocks["wall"]["y"] == [0, 1, 2, 3, 4, 99] and clocks["begun"] == 101.0
    assert clocks["tokens"]["y"] == [100, 200, 300, 400, 500, 600]
    make_run(tmp_path / "long", steps=5000)
    curve = ask(curves.curves, tmp_path / "long", metrics=["reward/mean"], points=100)["curves"]["long"]["reward/mean"]
    assert 90 <= len(curve["x"]) <= 110 and (curve["x"][0], curve["x"][-1]) == (1, 5000)
    monkeypatch.setattr(curves, "TOGETHER", 10)  # a report of many runs
    assert 90 <= len(ask(curves.curves, tmp_path / "long")["curves"]["long"]["reward/mean"]["x"]) <= 110
    with pytest.raises(AlignerError, match="points=0: expected an integer"):
        ask(curves.curves, tmp_path, points=0)


@pytest.mark.parametrize("steps", [5, 9000])
def test_phases_add_up_to_the_step(tmp_path, steps):
    """Those with a slash are part of others; a save comes after the step was measured."""
    parts = {"time/generate_s": 1.0, "time/update_s": 2.0, "time/eval/generate_s": 9.0}
    make_run(tmp_path / "a", steps, **parts)
    answer = ask(curves.phases, tmp_path)["phases"]["a"]
    assert answer["seconds"] == {"time/generate_s": steps, "time/update_s": 2 * steps}
    make_run(tmp_path / "a", steps, **parts, **{"time/step_s": 3.5, "time/save_s": 4.0})
    answer = ask(curves.phases, tmp_path)["phases"]["a"]
    known = {"time/generate_s": 1, "time/update_s": 2, "time/save_s": 4, "time/other_s": 0.5}
    assert answer["seconds"] == pytest.approx({name: seconds * steps for name, seconds in known.items()})
    for name, seconds in known.items():  # of a step, anywhere along the run; of a long one between points that are kept
        assert answer["layers"][name] == pytest.approx([seconds] * len(answer["x"]), rel=1e-3 if steps < 100 else 0.1)
    assert len(answer["x"]) == min(steps, curves.BINS) and answer["x"][-1] == steps
