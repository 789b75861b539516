"""State, progress, goodput and time left, from the files of a run."""

import json
from pathlib import Path

from aligner.cluster import watch
from aligner.cluster.lock import RunLock
from aligner.config.freeze import freeze
from aligner.config.resolve import compose


def run(folder: Path, steps=10, rows=(), metrics=(), **files) -> Path:
    freeze(compose([f"run.steps={steps}", f"run.dir={folder}"]), folder)
    (folder / "logs").mkdir()
    (folder / "logs/attempts.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    records = [{"step": step, "time/step_s": seconds} for step, seconds in metrics]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 99, "ti')
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_a_running_run_has_a_step_and_a_time_left(tmp_path):
    rows = [
        ("start", 7, 0, 1000, 0, "-", 8),
        ("end", 7, 0, 1100, 4, "stopped", 8),
        ("start", 7, 1, 1200, 4, "-", 8),
    ]
    folder = run(tmp_path / "a", rows=rows, metrics=[(n, 10.0) for n in range(1, 7)])
    status = watch.status(folder, {"7": "RUNNING"}, now_s=1250.0)
    assert (status.state, status.step, status.total, status.attempts) == ("RUNNING", 6, 10, 2)
    assert status.step_s == 10.0 and status.left_s == 40.0
    assert status.goodput == 60 / 150 and abs(status.rank_hours - 150 * 8 / 3600) < 1e-9


def test_state_follows_from_files_and_queue(tmp_path):
    rows = [("start", 7, 0, 1000, 0, "-", 1), ("end", 7, 0, 1100, 4, "x", 1)]
    assert watch.status(run(tmp_path / "done", rows=rows, DONE="sft"), {}, 2000).state == "DONE"
    assert watch.status(run(tmp_path / "ended", rows=rows[:1]), {}, 2000).state == "ended"
    for outcome in ("failed", "refused"):
        ended = [rows[0], ("end", 7, 0, 1100, 4, outcome, 1)]
        assert watch.status(run(tmp_path / outcome, rows=ended), {}, 2000).state == "failed"
        assert watch.status(tmp_path / outcome, {"7": "RUNNING"}, 2000).state == "RUNNING"
    assert watch.status(run(tmp_path / "stopped", rows=rows, STOPPED=""), {}, 2000).state == "stopped"
    (tmp_path / "stopped/logs/refused").write_text("no progress: the attempt began at step 4\n")
    assert watch.status(tmp_path / "stopped", {}, 2000).state == "failed"
    assert watch.status(run(tmp_path / "pending", rows=rows, STOPPED=""), {"7": "PENDING"}, 2000).state == "PENDING"
    new = watch.status(run(tmp_path / "new"), {}, 2000)
    assert (new.state, new.goodput, new.left_s, new.step_s) == ("not started", None, None, None)
    again = watch.status(run(tmp_path / "again", rows=rows, DONE="sft"), {"7": "RUNNING"}, 2000)
    assert again.state == "RUNNING"  # an old DONE, before the run removes it


def test_a_job_without_a_scheduler_runs_while_its_process_has_the_lock(tmp_path):
    folder = run(tmp_path / "a", rows=[("start", "local", 0, 1000, 0, "-", 1)])
    with RunLock(folder):
        assert watch.status(folder, {}, 2000).state == "RUNNING"
    assert watch.status(folder, {}, 2000).state == "ended"


def test_an_attempt_that_could_not_say_its_end(tmp_path):
    rows = [("start", 7, 0, 1000, 0, "-", 1), ("start", 7, 1, 1300, 0, "-", 1)]
    folder = run(tmp_path / "a", rows=rows)
    first, second = watch.attempts(folder, alive=True, now_s=1350.0)
    assert (first.end_s, second.end_s) == (1300.0, 1350.0)
    assert watch.attempts(folder, alive=False, now_s=9999.0)[1].end_s == 1300.0  # no sign of life after its start


def test_progress_may_be_ahead_of_the_metrics(tmp_path):
    folder = run(tmp_path / "a", metrics=[(1, 1.0)], progress_json='{"step": 5}')
    assert watch.status(folder, {}, 0).step == 5


def test_a_chains_folder_stands_for_its_runs(tmp_path, capsys):
    for name in ("sft", "rm"):
        run(tmp_path / "chain" / name, steps=7)
    assert {p.name for p in watch.expand([str(tmp_path / "chain")])} == {"sft", "rm"}
    assert watch.main([str(tmp_path / "chain")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == list(watch.COLUMNS) and len(rows) == 2 and "0/7" in rows[0]
    assert watch.clock(3725.4) == "1:02:05" and watch.clock(None) == "-"


def test_damage_of_a_run_costs_no_other_and_what_is_whole_counts(tmp_path, capsys):
    """A line of a full disk, a config of another encoding, numbers that no batch script writes."""
    rows = [("start", 7, 0, 1000, 0, "-", 2), ("end", 7, 0, 1100, 4, "x", 2)]
    odd = [("start", 7, 0, "9" * 400, 0, "-", 2), ("start", 7, 0, 1200, 0, "-", "9" * 5000)]
    folder = run(tmp_path / "a", rows=[*rows, *odd], metrics=[(1, 10.0)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\n\xff\xfe\0\n{"step": 2, "time/step_s": 20.0}\n')
    config = folder / "config.yaml"
    config.write_bytes(b"# \xff\n" + config.read_bytes())
    status = watch.status(folder, {}, 2000)
    assert (status.step, status.total, status.attempts, status.step_s) == (2, 10, 1, 20.0)
    assert status.rank_hours == 100 * 2 / 3600 and status.goodput == 0.3
    config.write_text("run:\n  steps: " + "9" * 5000 + "\n")
    run(tmp_path / "b", rows=rows)
    assert watch.main([str(tmp_path)]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]] == ["2/?", "0/10"]
