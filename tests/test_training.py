"""Runs from Python: `aligner.train`, in a process of its own, with callbacks in this one."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import aligner
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


@pytest.mark.slow
def test_callbacks_get_each_record_once_and_the_result_has_the_rest(tiny_data, tmp_path, capfd):
    steps, evaluations, ends = [], [], []
    settings = line(tiny_data, tmp_path / "run", "run.eval_every=2", "checkpoint.every=2")
    callbacks = {"on_step": steps.append, "on_evaluation": evaluations.append, "on_end": ends.append}
    result = aligner.train(settings, **callbacks)
    assert [record["step"] for record in steps] == [1, 2, 3] and all("sft/loss" in record for record in steps)
    assert [each["step"] for each in evaluations] == [0, 2, 3] and all("eval/loss" in each for each in evaluations)
    assert ends == [result] and (result.ended, result.step) == ("done", 3)
    assert result.metrics == stages.records(tmp_path / "run") and result.metrics[1:] == steps
    assert result.checkpoint == tmp_path / "run/checkpoints/step-00000003"
    assert result.model == tmp_path / "run/hf" and (result.model / "config.json").exists()
    assert "exported" in capfd.readouterr().out
    # a second call in this process, which resumes, with a composed config and two ranks; old records are not repeated
    steps.clear()
    longer = aligner.train(compose([*settings, "run.steps=5"]), ranks=2, on_step=steps.append, quiet=True)
    assert [record["step"] for record in steps] == [4, 5] and longer.step == 5
    assert [record["step"] for record in longer.metrics] == [0, 1, 2, 3, 4, 5]
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_run_that_fails_raises_its_own_error(tiny_data, tmp_path):
    reward = tmp_path / "broken.py"
    reward.write_text("def score(*a, **k):\n    raise RuntimeError('no score today')\n")
    settings = stages.overrides("grpo", tiny_data, tmp_path / "run", f"reward.functions=[{{path: {reward}:score}}]")
    with pytest.raises(RunFailedError, match="no score today") as failed:
        aligner.train(settings, quiet=True)
    assert failed.value.exit_code in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["callback", "Ctrl-C"])
def test_a_run_saves_and_stops_if_a_callback_raises_or_for_ctrl_c(tiny_data, tmp_path, way):
    settings = line(tiny_data, tmp_path / "run", "run.steps=100000")
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def react(record):
        if record["step"] == 1:
            if way == "callback":
                raise ValueError("enough")
            signal.raise_signal(signal.SIGINT)

    if way == "callback":
        with pytest.raises(ValueError, match="enough"):
            aligner.train(settings, on_step=react, quiet=True)
    else:
        result = aligner.train(settings, on_step=react, quiet=True)
        assert result.ended == "SIGINT" and result.step == stages.records(tmp_path / "run")[-1]["step"]
        assert result.model is None and result.checkpoint.name == f"step-{result.step:08d}"
    assert (tmp_path / "run/STOPPED").exists() and stages.checkpoints(tmp_path / "run")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
