"""Reading metrics as they are written: whatever the slices, the points are the data's, and no byte is read twice."""

from __future__ import annotations

import json
import math
import random

import numpy as np

from aligner.board import series as module
from aligner.board.series import BLOCK, CAPACITY, END, SO_FAR, TOKENS, Series, thin
from aligner.config.sections.logging import LoggingConfig
from aligner.run.metrics import MetricsLogger, truncate_jsonl

ALL = 1 << 60


def lines(records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read(path) -> Series:
    series = Series(path)
    series.look(ALL)
    return series


def values(found: Series, name: str) -> list:
    steps, values = found.points(name)
    return [(int(s), None if math.isnan(v) else v) for s, v in zip(steps, values, strict=True)]


def test_points_are_the_data_however_the_file_grows(tmp_path):
    rng = random.Random(0)
    records = [
        {"step": i, "wall_time": 10.0 + i, "a": rng.random(), **({"b": i} if i % 7 == 0 else {})} for i in range(900)
    ]
    records[5]["a"] = None
    data, path = lines(records), tmp_path / "metrics.jsonl"
    path.touch()
    grown, taken = Series(path), 0
    cuts = sorted(rng.sample(range(len(data)), 30))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        with path.open("ab") as file:
            file.write(data[start:end])
        taken += grown.look(ALL)
        whole = data[:end].rpartition(b"\n")[0].split(b"\n")
        assert grown.newest("step") == (json.loads(whole[-1])["step"] if whole[0] else None)
    assert taken <= len(data) + 31 * 300  # the last record, and what was half written, are read again
    for result in (grown, read(path)):
        assert values(result, "a") == [(r["step"], r["a"]) for r in records]
        assert values(result, "b") == [(r["step"], r["b"]) for r in records if "b" in r]
        assert result.names() == {"a", "b"} and result.share_read == 1 and not result.damage
    assert grown.look(ALL) == 0


def test_what_a_logger_writes_again_is_read_again(tmp_path):
    """A second log of a step joins its record; a run that resumes cuts the file and goes on."""
    logger = MetricsLogger(tmp_path, LoggingConfig(trackers=[]), {}, 0)
    series = Series(tmp_path / "metrics.jsonl")
    for step in range(6):
        logger.log(step, {"a": step})
        series.look(ALL)
        logger.log(step, {"b": 10 * step})
        series.look(ALL)
    assert values(series, "a") == [(i, i) for i in range(6)] and values(series, "b") == [(i, 10 * i) for i in range(6)]
    truncate_jsonl(series.path, 2)
    logger = MetricsLogger(tmp_path, LoggingConfig(trackers=[]), {}, 0)
    logger.resume_at(2)
    for step in range(3, 9):
        logger.log(step, {"a": -step})
    series.look(ALL)
    assert values(series, "a") == [(i, i if i < 3 else -i) for i in range(9)]
    series.path.unlink()
    assert series.look(ALL) == 0 and series.names() == set()


def test_a_long_run_takes_bounded_memory_and_keeps_its_peaks(tmp_path):
    path, rng, n = tmp_path / "metrics.jsonl", np.random.default_rng(1), 50_000
    a = rng.normal(size=n)
    a[[7, 31_234, 49_998]] = 50, -60, 70
    path.write_bytes(lines({"step": i, "a": float(v)} for i, v in enumerate(a)))
    series = Series(path)
    while series.share_read < 1 or not series.size:
        series.look(1)  # a block at a time
    steps, shown = series.points("a")
    assert len(steps) <= 1.5 * CAPACITY and (np.diff(steps) > 0).all()
    assert (shown == a[steps]).all() and {7, 31_234, 49_998} <= set(steps.tolist())
    gaps = np.diff(steps)
    assert gaps.max() <= 4 * n / CAPACITY * 2  # as dense at the end as at the start


def test_thin_keeps_the_lowest_and_highest_of_each_bucket():
    rng = np.random.default_rng(0)
    steps, data = np.arange(1003), rng.normal(size=1003)
    data[100:120] = np.nan
    kept, shown = thin((steps, data), 10)
    assert (np.diff(kept) > 0).all() and len(kept) == 203
    for start in range(0, 1000, 10):
        bucket, there = data[start : start + 10], shown[(kept >= start) & (kept < start + 10)]
        if not np.isnan(bucket).all():
            assert there.min() == np.nanmin(bucket) and there.max() == np.nanmax(bucket)
        else:
            assert np.isnan(there).all()  # a gap


def test_tokens_and_phases_add_up(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {"time/step_s": 2.0, "throughput/tokens_per_s": 50.0, "time/update_s": 1.5}
    path.write_bytes(lines({"step": i, **record} for i in range(1, 11)))
    content = read(path)
    assert values(content, TOKENS) == [(i, 100.0 * i) for i in range(1, 11)]
    assert content.newest(SO_FAR + "time/update_s") == 15.0


def test_a_file_of_any_size_is_read_within_the_budget(tmp_path):
    """The end at once, the rest in bounded parts."""
    path = tmp_path / "metrics.jsonl"
    record = {"step": 0, "wall_time": 1.0, "a": 0.25, "text": "x" * 30_000}
    path.write_bytes(lines({**record, "step": i} for i in range(600)))  # 18 MB
    series, parts = Series(path), []
    while series.share_read < 1 or not parts:
        assert 0 < series.look(BLOCK) <= 2 * BLOCK + END
        parts.append(series.share_read)
        assert series.newest("step") == 599
    assert parts == sorted(parts) and len(parts) >= 4
    assert Series(path).look(0) <= END
    assert len(series.points("a")[0]) == 600


def test_damage_is_reported_with_its_line_and_a_torn_end_is_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for data, steps, damage in (
        (b'{"step": 1, "a": 1}\n{"st\n{"step": 2, "a": 1}\n', [1, 2], "metrics.jsonl:2: not valid JSON"),
        (
            b'{"step": 1, "a": 1}\n[3]\n{"step": 2, "a": 1}\n{"step": 3, "a": 1}\n',
            [1, 2, 3],
            "metrics.jsonl:2: expected a",
        ),
        (
            b'{"step": 1, "a": 1}\n{"step": 2}, {"step": 3}\n{"step": 4, "a": 1}\n{}\n',
            [1, 4],
            "metrics.jsonl:2: not valid",
        ),
        (b'{"step": 1, "a": 1}\n{"st', [1], ""),
        (b'{"step": 1, "a": 1}\n{"st\n', [1], ""),  # the half line, and a newline that an editor adds
        (b'{"step": 1, "a": 1}\n\0\0\0\0\n\n{"step": 2, "a": 1}\n', [1, 2], ""),
        (
            b'{"step": 1, "a": 1}\n{"step": 2, "\\ud800": 1}\n{"step": 3, "a": 1}\n{"step": 4, "a": 1}\n',
            [1, 3, 4],
            "surrogate",
        ),
        (b"\xff\xfe\n" * 5, [], ""),
        (b"", [], ""),
    ):
        path.write_bytes(data)
        content = read(path)
        assert [step for step, _ in values(content, "a")] == steps, data
        assert damage in content.damage and bool(damage) == bool(content.damage), (data, content.damage)


def test_foreign_values_are_gaps(tmp_path):
    path, huge = tmp_path / "metrics.jsonl", "9" * 400
    path.write_text(
        f'{{"step": 1, "a": Infinity, "b": true}}\n{{"step": 2, "a": [1], "b": "x"}}\n{{"step": 3, "a": {huge}}}\n'
        f'{{"step": {huge}, "a": 1}}\n{{"a": 1}}\n{{"step": "x", "a": 1}}\n{{"step": 4, "a": 0.5}}\n'
        '{"step": 5, "a": NaN}\n'
    )
    content = read(path)
    assert values(content, "a") == [(1, None), (2, None), (3, None), (4, 0.5), (5, None)]
    assert not content.damage and content.newest("b") is None


def test_what_is_no_file_of_lines_is_reported(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").mkdir()
    assert "cannot be read" in (content := read(tmp_path / "metrics.jsonl")).damage and content.names() == set()
    monkeypatch.setattr(module, "BLOCK", 1 << 10)
    monkeypatch.setattr(module, "LONGEST", 1 << 12)
    (tmp_path / "long").write_bytes(b'{"step": 1, "a": 1}\n' + b"x" * 9000)
    assert "long:2: expected lines of at most 4096 bytes" in read(tmp_path / "long").damage
    (tmp_path / "fits").write_bytes(lines([{"step": 1, "a": 1, "x": "y" * 3000}, {"step": 2, "a": 1}]))
    assert len(read(tmp_path / "fits").points("a")[0]) == 2
