"""Runs from Python: `aligner.train`, in a process of its own, with callbacks in this one."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import aligner
from aligner import training
from aligner.cluster.lock import RunLock
from aligner.config.resolve import compose
from aligner.errors import ConfigError, RunFailedError, UnknownKeyError
from tests import stages


def line(data: Path, folder: Path, *settings: str) -> list[str]:
    return stages.overrides("sft", data, folder, "run.steps=3", f"data.eval={data / 'eval.jsonl'}", *settings)


def test_the_package_is_imported_without_torch_or_hydra():
    code = "import sys, aligner; assert not {'torch', 'hydra'} & {*sys.modules}; aligner.train; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = aligner.trian


def test_bad_input_is_an_exception_before_anything_starts(tiny_data, tmp_path):
    with pytest.raises(UnknownKeyError, match=r"optim\.lrr"):
        aligner.train([*line(tiny_data, tmp_path / "run"), "optim.lrr=1"])
    with pytest.raises(ConfigError, match=r"data\.train"):
        aligner.train("stage=sft data.train=absent.jsonl")
    with pytest.raises(ConfigError, match=r"logging\.jsonl=False"):
        aligner.train([*line(tiny_data, tmp_path / "run"), "logging.jsonl=false"], on_step=print)
    assert not (tmp_path / "run").exists()


def no_child_is_left(before: set[int]) -> bool:
    return {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_a_run_stopped_by_a_callback_then_by_ctrl_c_resumes_to_its_end(tiny_data, tmp_path, capfd):
    """Callbacks get each record once, of this start alone; the result has the rest."""
    run, before = tmp_path / "run", {child.pid for child in psutil.Process().children(recursive=True)}
    settings = line(tiny_data, run, "run.eval_every=2", "checkpoint.every=2", "run.steps=100000")

    def raises(record):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        aligner.train(settings, on_step=raises, quiet=True)
    (saved,) = stages.checkpoints(run)[-1:]
    assert (run / "STOPPED").exists() and saved == stages.records(run)[-1]["step"] and no_child_is_left(before)

    def interrupts(record):
        steps.append(record["step"])
        if len(steps) == 1:
            signal.raise_signal(signal.SIGINT)

    steps: list[int] = []
    stopped = aligner.train(compose(settings), ranks=2, on_step=interrupts, quiet=True)
    assert steps == [*range(saved + 1, stopped.step + 1)] and stopped.step == stages.records(run)[-1]["step"]
    assert stopped.ended == "SIGINT" and stopped.model is None and no_child_is_left(before)
    assert stopped.checkpoint == run / f"checkpoints/step-{stopped.step:08d}" and stopped.checkpoint.is_dir()
    assert capfd.readouterr().out == ""

    records, evaluations, ends, last = [], [], [], stopped.step + 3
    callbacks = {"on_step": records.append, "on_evaluation": evaluations.append, "on_end": ends.append}
    done = aligner.train([*settings, f"run.steps={last}"], **callbacks)
    assert [record["step"] for record in records] == [last - 2, last - 1, last]
    assert all("sft/loss" in record for record in records)
    expected = [step for step in (last - 2, last - 1, last) if step % 2 == 0 or step == last]
    assert [each["step"] for each in evaluations] == expected and all("eval/loss" in each for each in evaluations)
    assert ends == [done] and (done.ended, done.step) == ("done", last)
    assert done.metrics == stages.records(run) and [record["step"] for record in done.metrics] == [*range(last + 1)]
    assert done.metrics[-3:] == records and done.checkpoint == run / f"checkpoints/step-{last:08d}"
    assert done.model == run / "hf" and (done.model / "config.json").exists()
    assert "exported" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_raises_its_own_error(tiny_data, tmp_path):
    settings = line(tiny_data, tmp_path / "run")
    with RunLock(tmp_path / "run"), pytest.raises(RunFailedError, match="no other process uses") as failed:
        aligner.train(settings, quiet=True)
    assert failed.value.exit_code == 2


def test_a_run_that_has_not_begun_is_stopped_too(tmp_path, monkeypatch):
    guarded = training.guarded
    monkeypatch.setattr(training, "guarded", lambda command: guarded(["sleep", "60"]))
    child = training._Child([], tmp_path, quiet=True)
    child.stop()  # the guard is still importing
    child.close()
    assert child.code == -signal.SIGINT


def test_output_is_shown_in_whole_characters(tmp_path, monkeypatch, capfd):
    write = "w = lambda b: os.write(1, b); w(b'\\xc3'); time.sleep(0.5); w(b'\\xbc')"
    command = [sys.executable, "-c", f"import os, time; {write}"]
    guarded = training.guarded
    monkeypatch.setattr(training, "guarded", lambda _: guarded(command))
    child = training._Child([], tmp_path, quiet=False)
    while not child.ended():
        pass
    child.close()
    assert capfd.readouterr().out == "\u00fc"
