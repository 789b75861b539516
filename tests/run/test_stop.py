"""Asked to stop, a run saves at the next step boundary on all ranks, says so, and later goes on as if it had not."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from aligner.__main__ import main
from aligner.cluster.signals import StopSignals
from aligner.cluster.watch import newest_step
from aligner.config.sections.cluster import ClusterConfig
from aligner.errors import (
    NO_RESTART,
    AlignerError,
    CheckpointError,
    ConfigError,
    RewardError,
    WriteError,
)
from aligner.run.loop import Run
from aligner.run.stop import Boundary, Deadline, allocation_end, process_age_s, read_progress, restarted
from tests import stages
from tests.run.jobs import run_stage

MORE = ["run.steps=4", "logging.progress=false", "optim.schedule=cosine"]


def stop_after(arguments: list[str], step: int, rank: int, number: int) -> None:
    """`run_stage`, in which one rank gets a signal during `step`."""
    signals, finish = StopSignals(), Run.finish

    def reported(self, now, *args, **kwargs):
        finish(self, now, *args, **kwargs)
        if now == step and dist.get_rank() == rank:
            signals._note(number, None)

    Run.finish = reported
    try:
        assert run_stage(arguments, signals) == 0
    finally:
        Run.finish = finish


def start(run: Path, arguments: list[str], log: Path, ranks: int = 2) -> subprocess.Popen:
    """`aligner launch` as a process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {"PYTHONPATH": str(stages.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "aligner", "launch", "--ranks", str(ranks), *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(command, cwd=stages.ROOT, env=environment, stdout=out, stderr=out)


def until(process: subprocess.Popen, log: Path, condition) -> None:
    while not condition():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)


def progress(run: Path) -> dict:
    return json.loads((run / "progress.json").read_text()) if (run / "progress.json").exists() else {"step": -1}


@pytest.mark.slow
@pytest.mark.multirank
def test_term_stops_two_ranks_at_a_step_boundary_and_they_go_on(ranks, tiny_data, tmp_path):
    """The launcher gets the signal, again and again until it has ended; the steps are too many to end by themselves.
    Then a run told only of the steps that were done gives the same bits."""
    run, log = tmp_path / "run", tmp_path / "log"
    line = stages.overrides("sft", tiny_data, run, "run.steps=100000", "logging.progress=false")
    process = start(run, line, log)
    until(process, log, lambda: progress(run)["step"] >= 3)
    while process.poll() is None:
        process.terminate()
        time.sleep(0.05)
    assert process.returncode == 0, log.read_text()
    step = progress(run)["step"]
    content = json.loads((run / "STOPPED").read_text())
    assert (content["step"], content["reason"]) == (step, "SIGTERM") and progress(run)["saved"] == step
    assert stages.checkpoints(run) == [step] and not (run / "DONE").exists() and not (run / "hf").exists()
    line += [f"run.steps={step + 2}"]
    ranks.run(run_stage, world=2, arguments=line)
    assert (run / "DONE").exists() and not (run / "STOPPED").exists()
    other = stages.overrides("sft", tiny_data, tmp_path / "other", f"run.steps={step + 2}", "logging.progress=false")
    ranks.run(run_stage, world=2, arguments=other)
    assert stages.same_weights(run, tmp_path / "other") and stages.differences(run, tmp_path / "other") == []


@pytest.mark.slow
@pytest.mark.multirank
def test_a_signal_to_one_rank_stops_both(ranks, tiny_data, tiny_runs, tmp_path):
    overrides = [*MORE, f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}"]
    lines = {name: stages.overrides("ppo", tiny_data, tmp_path / name, *overrides) for name in ("cut", "whole")}
    ranks.run(stop_after, world=2, arguments=lines["cut"], step=2, rank=1, number=int(signal.SIGTERM))
    content = json.loads((tmp_path / "cut" / "STOPPED").read_text())  # by rank 0, which writes it while rank 1 ends
    assert (content["step"], content["reason"]) == (2, "SIGTERM")
    assert stages.checkpoints(tmp_path / "cut") == [2]
    for line in lines.values():
        ranks.run(run_stage, world=2, arguments=line)
    assert stages.same_weights(tmp_path / "cut", tmp_path / "whole")
    assert stages.differences(tmp_path / "cut", tmp_path / "whole") == []


def test_the_end_of_the_allocation_stops_in_time(tiny_data, tmp_path, monkeypatch):
    """A save of 40 s and a margin of 30 s do not fit into 60 s, whatever a step takes. It stops after the first: before
    it, it would never come further."""
    run = tmp_path / "run"
    whole = stages.stage("sft", tiny_data, tmp_path / "whole", *MORE)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    run.mkdir()
    (run / "progress.json").write_text(json.dumps({"step": 0, "saves_s": [40.0]}))
    stages.stage("sft", tiny_data, run, *MORE, "cluster.margin_s=30")
    assert json.loads((run / "STOPPED").read_text())["reason"] == "the allocation ends soon"
    assert progress(run)["step"] == 1 and stages.checkpoints(run) == [1]
    assert progress(run)["saves_s"][0] == 40.0 and len(progress(run)["saves_s"]) == 2
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    limit = process_age_s() + 3600
    stages.stage("sft", tiny_data, run, *MORE, f"cluster.time_limit_s={limit}", "cluster.margin_s=30")
    assert progress(run)["step"] == 4 and (run / "DONE").exists()
    assert stages.same_weights(run, whole)


def test_a_deadline_counts_the_longest_step_and_save():
    assert not Deadline().passed(1e12)
    at = Deadline(end_s=1000.0, margin_s=60.0, step_s=40.0)
    at.saves_s.extend([100.0, 1.0])
    assert not at.passed(799.9) and at.passed(800.1)
    at.saves_s.extend([10.0] * 4)  # a slow save is forgotten
    assert not at.passed(889.9) and at.passed(890.1)


@pytest.mark.parametrize("text", ["null", "[]", "", '{"saves_s": null}', '{"saves_s": 7}', '{"saves_s": [null]}'])
def test_a_strange_progress_file_tells_nothing(tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    assert read_progress(tmp_path)[1] == [] and newest_step(tmp_path, {3: 1.0}) == 3


def began_at() -> float:
    """Of this process; earlier where it is held up between the two."""
    return time.time() - process_age_s()


def test_the_end_of_a_job(tmp_path, monkeypatch):
    none = ClusterConfig()
    assert allocation_end(none, {}) is None
    assert allocation_end(none, {"SLURM_JOB_END_TIME": "1700000000"}) == 1700000000
    limited = ClusterConfig(time_limit_s=100.0)
    begun, ends = (max(what() for _ in range(3)) for what in (began_at, lambda: allocation_end(limited, {})))
    assert ends == pytest.approx(begun + 100, abs=2)
    assert allocation_end(limited, {"SLURM_JOB_END_TIME": "1700000000"}) == 1700000000  # the earlier one
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$*" = "-h -j 7 -o %e" ] && echo 2026-01-02T03:04:05\n')
    squeue.chmod(0o755)
    asked = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert time.localtime(allocation_end(none, asked))[:6] == (2026, 1, 2, 3, 4, 5)
    squeue.write_text("#!/bin/sh\necho N/A\n")
    assert allocation_end(none, asked) is None


def test_a_process_knows_its_age():
    before = process_age_s()
    output = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True).stdout
    assert before - 2 < float(output) < process_age_s() + 2


def test_the_first_signal_counts_and_the_old_handlers_come_back():
    from aligner.cluster.signals import StopSignals

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals("USR2") as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGUSR2
    assert signal.getsignal(signal.SIGTERM) == before


ENDS = """
import os, signal, sys
from aligner.cluster.signals import StopSignals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopSignals("HUP", last=True) as signals:
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.received == 0  # nohup
    os.kill(os.getpid(), signal.%s)
    if sys.argv[1:]:
        os.kill(os.getpid(), signal.%s)
class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
ends = Ends()
print(signals.received, flush=True)
"""


@pytest.mark.parametrize(("name", "again", "code"), [("SIGTERM", True, 0), ("SIGINT", False, 0), ("SIGINT", True, -2)])
def test_a_late_request_changes_no_exit_code_and_the_second_ctrl_c_ends_it(name, again, code):
    """The object's end comes within Python's own, when its handlers are gone."""
    command = [sys.executable, "-c", ENDS % (name, name), *(["x"] if again else [])]
    done = subprocess.run(command, cwd=stages.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else f"{int(signal.Signals[name])}\n")


def test_a_boundary_measures_the_longest_step(monkeypatch):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps, up, jumps = iter([900.0, 930.0, 950.0, 971.0]), iter([930.0, 950.0, 971.0]), iter([0.0, 1e9, -1e9, 5.0])
        deadline = Deadline(end_s=1000.0, margin_s=0.0)
        boundary = Boundary(deadline=deadline, clock=lambda: next(steps))
        monkeypatch.setattr("aligner.run.stop.uptime_s", lambda: next(up))
        monkeypatch.setattr("aligner.run.stop.time.time", lambda: next(jumps))  # somebody sets the clock
        results = [boundary.settle(writing=False)[0] for _ in range(4)]
        assert boundary.deadline.step_s == 30.0 and results == ["", "", "", "the allocation ends soon"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", 1, "2"), NO_RESTART),
        (CheckpointError("another model"), NO_RESTART),
        (AlignerError("gradient norm nan"), NO_RESTART),
        (WriteError("no space left"), 1),
        (RewardError("the judge is away"), 1),
    ],
)
def test_what_would_fail_again_tells_the_batch_script(monkeypatch, capsys, error, code):
    def fail(args):
        raise error

    monkeypatch.setitem(main.__globals__["_HANDLERS"], "run", fail)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["run"]) == error.exit_code
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["run"]) == code


def test_a_requeued_job_continues(tiny_data, tmp_path, monkeypatch):
    """`run.resume=never` is for its first start."""
    assert not restarted({}) and not restarted({"SLURM_RESTART_COUNT": "0"}) and restarted({"SLURM_RESTART_COUNT": "2"})
    run = stages.stage("sft", tiny_data, tmp_path / "run", "run.steps=2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    stages.stage("sft", tiny_data, run, "run.steps=4", "run.resume=never")
    assert [r["step"] for r in stages.records(run)] == [1, 2, 3, 4] and not list(run.glob("checkpoints.old-*"))


def test_a_full_disk_at_the_export_may_be_helped(tiny_data, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("aligner.refit.export.write_hf", full)
        with pytest.raises(WriteError, match="No space left") as error:
            stages.stage("sft", tiny_data, tmp_path / "run", "run.steps=1", "run.export=true")
    assert error.value.transient
    stages.stage("sft", tiny_data, tmp_path / "run", "run.steps=1", "run.export=true")
    assert (tmp_path / "run/DONE").exists() and (tmp_path / "run/hf/model.safetensors").exists()


def test_a_reward_path_that_is_wrong_is_bad_input_and_fails_again(tiny_data, tmp_path, monkeypatch, capsys):
    line = stages.overrides("grpo", tiny_data, tmp_path / "run", "reward.functions=[{path: none.py:f}]")
    assert main(["run", *line]) == 2 and "reward.functions[0].path='none.py:f'" in capsys.readouterr().err
    monkeypatch.setenv("ALIGNER_BATCH", "1")
    assert main(["run", *line]) == NO_RESTART
