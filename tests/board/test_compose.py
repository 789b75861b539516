"""The form of a run: what it says is what the command line says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner import __main__ as command_line
from aligner.board.compose import RunForm, check, composed, form, shown
from aligner.board.jobs import Jobs
from aligner.board.runs import Board
from aligner.cluster import lock
from aligner.cluster.lock import RunLock
from aligner.config.freeze import to_yaml
from aligner.config.options import GROUPS
from aligner.config.resolve import compose
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.foreign import JsonObject
from tests.board.recordings import run_folder

GRPO = {"stage": "grpo", "model": "qwen3_0.6b"}


def ask(answer=check, **asked):
    return answer(Board([]), JsonObject(asked, "test", DataError))


def test_the_form_has_every_group_and_key():
    answer = ask(form)
    assert tuple(answer["groups"]) == GROUPS and "quickstart_grpo" in answer["groups"]["experiment"]
    lr = next(key for key in answer["keys"] if key["name"] == "optim.schedule")
    assert lr["choices"] == ("constant", "linear", "cosine") and lr["meaning"]
    assert "h100" in answer["devices"] and "generic" in answer["sites"]


@pytest.mark.parametrize(
    ("wish", "key"),
    [
        ({"values": {"optim.lr": "fast"}}, "optim.lr"),
        ({"values": {"optim.lrr": "1"}}, "optim.lrr"),
        ({"values": {"optim.betas": "[0.9"}}, "optim.betas"),
        ({"groups": {"stage": "gpro"}}, "stage"),
        ({"values": {"data.train": "a (b) = c"}}, "data.train"),
        ({"values": {"run.dir": ""}}, "run.dir"),
        ({"ranks": 0, "values": {"data.train": "."}}, "--ranks"),
        ({"groups": GRPO, "ranks": 3, "values": {"data.train": ".", "reward.functions": "[{path: math}]"}}, None),
    ],
)
def test_what_is_wrong_is_reported_as_the_command_line_does(wish, key, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = ask(**wish)
    words = shlex.split(answer["command"])
    assert words[:3] == ["python", "-m", "aligner"] and command_line.main(words[3:]) == 2
    assert capsys.readouterr().err == answer["error"]["text"] + "\n"
    assert key in (None, answer["error"]["key"])


def test_values_are_those_of_the_command(tmp_path):
    """Overrides of the form, YAML and the groups' own values, against what the same words compose to."""
    wish = {"groups": GRPO, "values": {"optim.lr": "3e-5", "run.dir": str(tmp_path), "data.train": "."}}
    answer = ask(**wish, gpus=16)
    words = shlex.split(answer["command"])
    assert words[3:9] == ["launch", "--ranks", "1", "stage=grpo", "model=qwen3_0.6b", "optim.lr=3e-5"]
    assert yaml.safe_load(answer["yaml"]) == yaml.safe_load(to_yaml(compose(words[6:])))
    assert (answer["base"]["optim.lr"], answer["base"]["batch.group"]) == ("0.0001", "8")
    assert "critic.trunk" in answer["unread"] and "sampling.temperature" not in answer["unread"]
    assert answer["plan"]["table"].startswith("grpo on 16 x h100") and not answer["plan"]["error"]
    assert "plan --gpus 16" in answer["plan"]["command"]


def test_a_plan_that_does_not_fit_is_shown_and_refused():
    found = ask(groups=GRPO | {"model": "llama3_70b"}, values={"data.train": "."}, gpus=1)
    assert "phase" in found["plan"]["table"] and "error: the job does not fit" in found["plan"]["error"]


def test_what_the_form_shows_means_the_same_when_typed():
    base = ask(groups={"experiment": "quickstart_grpo"})["base"]
    values = {key: text for key, text in base.items() if not key.startswith("stage.")}
    again = composed(RunForm({"experiment": "quickstart_grpo"}, values))
    assert again == composed(RunForm({"experiment": "quickstart_grpo"}))


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12).filter(str.strip))
def test_any_text_reaches_the_config_as_it_was_typed(text):
    found = composed(RunForm(values={"model.tokenizer": text, "data.columns": shown({"prompt": text})}))
    assert (found.model.tokenizer, found.data.columns) == (text, {"prompt": text})


def test_a_dry_run_comes_before_a_submit(tmp_path, monkeypatch):
    jobs, wish = (
        Jobs(),
        RunForm({"stage": "sft"}, {"data.train": ".", "run.dir": str(tmp_path / "run")}, "submit", nodes=2),
    )
    shown = jobs.dry(wish)
    assert "#SBATCH --nodes=2" in shown["text"] and "# sbatch --parsable" in shown["text"]
    assert not (tmp_path / "run").exists()
    calls = []
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **_: calls.append(argv) or subprocess.CompletedProcess(argv, 0, "job 7", "")
    )
    with pytest.raises(AlignerError, match="what a dry run has shown"):
        jobs.submit("guessed")
    assert jobs.submit(shown["key"]) == {"text": "job 7"} and calls[0][3:] == wish.argv()
    with pytest.raises(AlignerError, match="what a dry run has shown"):
        jobs.submit(shown["key"])


def test_nothing_starts_or_stops_that_may_not(tmp_path, monkeypatch):
    jobs = Jobs()
    with pytest.raises(ConfigError, match=r"data\.train=''"):
        jobs.start(RunForm({"stage": "sft"}, {"run.dir": str(tmp_path / "run")}))
    with pytest.raises(ConfigError, match="command='submit'"):
        jobs.start(RunForm(command="submit"))
    with pytest.raises(ConfigError, match="command='launch'"):
        jobs.dry(RunForm())
    with pytest.raises(AlignerError, match="expected a run that is running on this machine"):
        jobs.stop(run_folder(tmp_path / "still"))
    assert not jobs.started and not (tmp_path / "run").exists()
    with RunLock(tmp_path / "still"), monkeypatch.context() as patched:
        assert jobs.pid(tmp_path / "still") == os.getpid()
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(AlignerError, match="expected a run that is running"):  # what others wrote names no process
            jobs.stop(tmp_path / "still")
    with pytest.raises(ConfigError, match="command='rm'"):
        ask(command="rm")


def test_no_process_is_signalled_that_a_lock_only_names(tmp_path):
    """All of the user's (-1), a group's (0), a bystander, the board's own parent."""
    run, jobs = run_folder(tmp_path / "run"), Jobs()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        for pid in (-1, 0, 1, -bystander.pid, bystander.pid, os.getppid(), True, str(bystander.pid)):
            named = lock._own_record() | {"pid": pid}
            named["started"] = lock._started(abs(int(pid))) or 1
            (run / "lock.json").write_text(json.dumps(named))
            assert jobs.pid(run) is None
            with pytest.raises(AlignerError, match="expected a run that is running"):
                jobs.stop(run)
        assert bystander.poll() is None
        bystander.communicate(b"\n")
    assert bystander.returncode == 0
