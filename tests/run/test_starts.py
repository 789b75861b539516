"""What a run folder says of where it came from."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from aligner.errors import AlignerError
from aligner.run import starts
from aligner.run.metrics import read_jsonl
from aligner.run.stop import StopRequested
from tests import stages

CPU = torch.device("cpu")


def test_each_start_and_its_end_is_a_record(tmp_path):
    path = tmp_path / "run" / starts.FILE

    def begin():
        start = starts.Start(path.parent, 0, starts.start_record(2, CPU, parameters=7))
        start.accepted()
        return start

    with begin().ends():
        (first,) = read_jsonl(path)
    assert first["ranks"] == 2 and first["host"] and first["hardware"]["cores"] >= 1 and first["parameters"] == 7
    assert first["versions"]["torch"] == torch.__version__.partition("+")[0] and "megatron-core" in first["versions"]
    with pytest.raises(StopRequested), begin().ends():
        raise StopRequested("sft stopped at step 3 of 9: USR1")
    with path.open("a") as file:
        file.write('{"started": "20')  # killed while it wrote
    with pytest.raises(AlignerError), begin().ends():
        raise AlignerError("args={api_key: 'abc'}: expected something else")
    kinds = [("started" in record, record.get("result")) for record in read_jsonl(path)]
    stopped, failed = "StopRequested: sft stopped at step 3 of 9: USR1", "AlignerError: args={api_key: <hidden>}"
    assert [kind for kind, _ in kinds] == [True, False] * 3
    assert [how for _, how in kinds[1::2]] == ["done", stopped, f"{failed}: expected something else"]


def test_a_start_that_is_refused_and_other_ranks_write_nothing(tmp_path):
    with pytest.raises(AlignerError), starts.Start(tmp_path / "run", 0, {}).ends():
        raise AlignerError("data.train: expected something else")
    other = starts.Start(tmp_path / "run", 1, {})
    other.accepted()
    with other.ends():
        assert not (tmp_path / "run").exists()


def test_secrets_home_and_name_stay_out_of_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/people/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    reports = [
        "run.dir=/people/ada/runs",
        "data.train=/fast/ada/x.jsonl",
        "model.init=/people/adam/m",
        "reward.functions=[{path: r.py:f, args: {api_key: k1, auth_token: 'k 2', limit: 3}}]",
        "password=k3",
        "x=hf_abcdefghijklmnopqrstuv",
        "data.max_tokens=200",
        "model.tokenizer=t",
    ]
    text = starts.command_line(["run", *reports])
    assert not [piece for piece in ("ada/", "k1", "k 2", "k3", "hf_abc") if piece in text]
    kept = ["run.dir=~/runs", "/fast/$USER/x.jsonl", "/people/adam/m", "limit: 3", "data.max_tokens=200", "tokenizer=t"]
    assert [piece for piece in kept if piece not in text] == []
    monkeypatch.setenv("SECRET_OF_MINE", "do-not-tell")
    assert "do-not-tell" not in json.dumps(starts.start_record(1, CPU))


def test_a_user_without_a_name_has_a_command_too(monkeypatch):
    """In containers that run with a number that /etc/passwd does not have."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setenv("HOME", "/")
    assert starts.command_line(["run", "run.dir=/fast/ada"]) == "aligner run run.dir=/fast/ada"
    monkeypatch.delenv("HOME")
    assert starts.command_line(["run", "run.dir=/fast/ada"]) == "aligner run run.dir=/fast/ada"


def test_the_commit_is_of_aligners_checkout_alone(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert starts.git_state(tmp_path) == (None, None)
    git("init", "-q")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "x")
    commit, dirty = starts.git_state(tmp_path)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "inner" / "file").write_text("2")
    assert starts.git_state(tmp_path) == (commit, True)
    assert starts.git_state(tmp_path / "inner") == (None, None)  # installed within somebody's project


def test_of_a_copy_on_a_node_the_commit_is_the_checkouts(tmp_path, monkeypatch):
    """The copy has no history."""
    for name, value in {"ALIGNER_NODE_LOCAL": "/tmp/x", "ALIGNER_ROOT": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(starts, "git_state", lambda root: (f"of {root}", False))
    assert starts.start_record(1, CPU)["commit"] == f"of {tmp_path}"


def test_a_reward_that_changes_the_folder_leaves_the_run_where_it_is(tiny_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("import os\ndef f(samples):\n    os.chdir('/')\n    return [0.5 for _ in samples]\n")
    overrides = ("run.steps=1", "run.export=false", "reward.functions=[{path: r.py:f}]", "checkpoint.every=1")
    stages.stage("grpo", tiny_data, Path("here"), *overrides)
    assert (tmp_path / "here" / "DONE").exists() and stages.checkpoints(tmp_path / "here") == [1]
    assert [r.get("result") for r in read_jsonl(tmp_path / "here" / starts.FILE)] == [None, "done"]
