"""metrics.jsonl: one record per step, also over a resume; nothing but rank 0 writes; NaN becomes null."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from aligner.config.sections.logging import LoggingConfig
from aligner.errors import AlignerError
from aligner.run.metrics import MetricsLogger, read_jsonl, truncate_jsonl

PLAIN = LoggingConfig(trackers=[])


def logger(folder, config=PLAIN, rank=0) -> MetricsLogger:
    return MetricsLogger(folder, config, {}, rank)


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_record_per_step(tmp_path):
    log = logger(tmp_path)
    for step in range(3):
        log.log(step, {"sft/loss": 1.0 / (step + 1), "n": step})
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == [0, 1, 2]
    assert logged[2]["sft/loss"] == pytest.approx(1 / 3)
    assert isinstance(logged[2]["n"], int)
    assert logged[0]["wall_time"] <= logged[2]["wall_time"]


def test_no_number_is_null_and_tensors_are_numbers(tmp_path):
    logger(tmp_path).log(1, {"a": math.nan, "b": math.inf, "c": torch.tensor(0.5), "d": None})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert {k: v for k, v in json.loads(text).items() if k in "abcd"} == {"a": None, "b": None, "c": 0.5, "d": None}


def test_a_second_log_of_a_step_joins_its_record(tmp_path):
    log = logger(tmp_path)
    log.log(0, {"a": 1.0})
    log.log(1, {"a": 2.0})
    log.log(1, {"eval/accuracy": 0.5})
    log.log(2, {"a": 3.0})
    assert [(r["step"], r.get("a"), r.get("eval/accuracy")) for r in records(tmp_path)] == [
        (0, 1.0, None),
        (1, 2.0, 0.5),
        (2, 3.0, None),
    ]


def test_resume_drops_later_records_and_a_torn_line(tmp_path):
    log = logger(tmp_path)
    for step in range(1, 8):
        log.log(step, {"a": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "wall_ti')
    again = logger(tmp_path)
    again.resume_at(4)
    again.log(4, {"eval/loss": 1.0})  # joins the record of the resumed step
    for step in range(5, 10):
        again.log(step, {"a": 100 + step})
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == list(range(1, 10))
    assert [r["a"] for r in logged] == [1, 2, 3, 4, 105, 106, 107, 108, 109]
    assert logged[3]["eval/loss"] == 1.0


@pytest.mark.parametrize("moment", ["cut off", "half written", "disk full"])
def test_a_record_that_is_joined_outlives_a_kill(tmp_path, monkeypatch, moment):
    """Between its cut and its writing; the checkpoint of step 2 is there by then."""
    log = logger(tmp_path)
    for step in (1, 2):
        log.log(step, {"a": step})

    class PowerCutError(Exception):
        pass

    cut = os.truncate

    def and_no_more(*args):
        if moment == "disk full":
            raise OSError(28, "No space left on device")
        cut(*args)
        if moment == "half written":
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 2, "wall')
        raise PowerCutError

    monkeypatch.setattr(os, "truncate", and_no_more)
    with pytest.raises((PowerCutError, AlignerError)):
        log.log(2, {"time/save_s": 0.5})
    monkeypatch.undo()
    again = logger(tmp_path)
    again.resume_at(2)
    again.log(3, {"a": 3})
    logged = records(tmp_path)
    assert [(r["step"], r["a"]) for r in logged] == [(1, 1), (2, 2), (3, 3)]
    assert logged[1].get("time/save_s") == (None if moment == "disk full" else 0.5)
    again.resume_at(1)  # an older checkpoint after all: what was joined then does not come back
    assert [r["step"] for r in records(tmp_path)] == [1]


def test_what_a_joined_record_needed_is_gone_once_it_is_written(tmp_path):
    log = logger(tmp_path)
    for step in (1, 2):
        log.log(step, {"a": step})
        log.log(step, {"b": step})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert [(r["a"], r["b"]) for r in records(tmp_path)] == [(1, 1), (2, 2)]


GARBAGE = [b"garbage\n{}\n", bytes(range(256)) * 9, b'{"step": "x"}\n', b"{}\n", b"[1]\n{}\n", b'{"step": 1e400}\n']


@pytest.mark.parametrize("data", [*GARBAGE, b"", b"\0" * 4096, b'{"step": 9, "a'])
def test_garbage_where_a_joined_record_would_be_refuses_no_start(tmp_path, capsys, data):
    log = logger(tmp_path)
    log.log(1, {"a": 1})
    (tmp_path / "metrics.joined.jsonl").write_bytes(data)
    again = logger(tmp_path)
    again.resume_at(1)
    again.log(2, {"a": 2})
    assert [r["a"] for r in records(tmp_path)] == [1, 2] and not (tmp_path / "metrics.joined.jsonl").exists()
    output = capsys.readouterr().err.splitlines()
    assert len(output) == (data in GARBAGE) and all("metrics.joined.jsonl" in line for line in output)


def test_a_record_without_a_step_is_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(AlignerError, match=r"metrics.jsonl: no value for step"):
        logger(tmp_path).resume_at(1)


def test_a_fresh_start_forgets_everything(tmp_path):
    logger(tmp_path).log(0, {"a": 1})
    log = logger(tmp_path)
    log.resume_at(-1)
    log.log(0, {"b": 2})
    assert [(r["step"], "a" in r) for r in records(tmp_path)] == [(0, False)]


def test_going_back_without_resume_is_refused(tmp_path):
    log = logger(tmp_path)
    log.log(5, {})
    with pytest.raises(AssertionError, match="step 4 logged after step 5"):
        log.log(4, {})


def test_other_ranks_write_nothing(tmp_path):
    log = logger(tmp_path / "run", LoggingConfig(trackers=["tensorboard", "wandb"]), rank=1)
    log.resume_at(0)
    log.log(1, {"a": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AlignerError, match=r"run.dir=.*file.*folder that can be written"):
        logger(tmp_path / "file" / "run").log(1, {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(AlignerError, match=r"run.dir=.*No space left"):
        logger(tmp_path).log(1, {"a": 1})


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(AlignerError, match=r"metrics.jsonl:2: "):
        read_jsonl(path)
    truncate_jsonl(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()
