"""The soak command: a few kills here, fifty by hand (docs/explanation/resume.md)."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aligner.run.chain import VERSION, Chain, StepHashes
from tests import soak, stages


@pytest.mark.slow
def test_killed_runs_resume_without_a_mismatch(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak", "--kills", "3", "--seed", "4", "--layouts", "one"]
    command += ["--stages", "sft", "--folder", str(tmp_path / "soak")]
    done = subprocess.run(command, cwd=stages.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 kills, \d+ resumes \(0 with a late view\), 0 mismatches", done.stdout, re.M), done.stdout


def test_every_point_of_a_kill_is_there():
    assert not [point for point, (owner, name) in soak.POINTS.items() if not callable(getattr(owner, name, None))]


def test_the_process_of_an_engine_is_killed_where_there_is_one():
    soaking = soak.Soak.__new__(soak.Soak)
    soaking.random = random.Random(0)
    of_ranks, with_vllm = ([soaking.draw("grpo", layout, 1.0) for _ in range(300)] for layout in ("one", soak.VLLM))
    assert not any(kill.child or kill.point == soak.CHILD for kill in of_ranks)
    assert 60 < sum(kill.child for kill in with_vllm) < 180
    assert {kill.point for kill in with_vllm if not kill.child} > {"", "a refit", "a stored rollout"}


def fake_run(
    folder: Path, weights: bytes = b"w", optimizer: bytes = b"o", cursor: int = 1, loss: float = 1.0, row: str = "a"
) -> Path:
    chain = Chain(folder, 0, {}, StepHashes(), torch.device("cpu"))
    made_by = {"config": {}, "code": {}, "versions": {}, "ranks": 1, "device": "cpu", "dtype": "float32"}
    chain._write({"step": 0, "start": {"version": VERSION, "tensors": [], **made_by}, "weights": ""})
    for step in range(1, soak.TOTAL + 1):
        chain._write({"step": step, "batch": {"rows": row}, "numbers": {}, "weights": ""})
    checkpoint = folder / "checkpoints" / f"step-{soak.TOTAL:08d}"
    for path, content in (
        (folder / "hf" / "model.safetensors", weights),
        (checkpoint / "policy" / "__0_0.distcp", optimizer),
        (checkpoint / "state.json", json.dumps({"state": {"data": cursor}}).encode()),
        (folder / "metrics.jsonl", json.dumps({"step": 1, "sft/loss": loss, "time/step_s": loss}).encode() + b"\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_what_counts_as_a_mismatch(tmp_path):
    whole = fake_run(tmp_path / "whole")
    assert soak.differences(fake_run(tmp_path / "same"), whole) == []
    for name, change, result in (
        ("a", {"weights": b"x"}, "hf/model.safetensors"),
        ("b", {"optimizer": b"x"}, "policy/__0_0.distcp"),
        ("c", {"cursor": 2}, "state of data"),
        ("d", {"loss": 2.0}, "sft/loss"),
        ("e", {"row": "b"}, "differ at step 1 of 1 to 6: rows"),
    ):
        (actual,) = soak.differences(fake_run(tmp_path / name, **change), whole)
        assert result in actual
    (tmp_path / "a" / "hf" / "model.safetensors").unlink()
    assert soak.differences(tmp_path / "a", whole) == ["hf/model.safetensors"]
