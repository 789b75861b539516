"""Run folders of an earlier version, killed in step 3 of 4 with a checkpoint of step 2, resume."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from aligner.run.metrics import read_jsonl
from tests import digests, stages

ARCHIVE = Path(__file__).parents[1] / "assets" / "old_runs.tar.xz"  # of commit 2b6626e: inputs, runs, numbers to come
RUNS = {
    "sft": (1, digests.LORA),
    "ppo": (1, [*digests.LORA, "critic.trunk=policy"]),
    "grpo": (2, ["engine.ranks=1", "engine.lag=1", *digests.WINDOW]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_resumes(name, tmp_path, capfd):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    inputs, run, (world, own) = digests.Inputs(tmp_path), tmp_path / "runs" / name, RUNS[name]
    before = (run / "steps.jsonl").read_text().splitlines()
    arguments = inputs.overrides(name, run, [*own, "run.resume=auto", "run.accept_changes=false"])
    arguments = [x for x in arguments if not x.startswith(("run.steps", "checkpoint.every"))]
    arguments += ["run.steps=4", "checkpoint.every=2"]
    if world == 1:
        stages.run(arguments)
        output = "".join(capfd.readouterr())
    else:
        command = [sys.executable, "-m", "aligner", "launch", "--ranks", str(world), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=stages.ROOT)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
    assert (run / "steps.jsonl").read_text().splitlines()[0] == before[0]
    assert "the weights of step 2 are not those" not in output
    steps = {record["step"]: record for record in stages.timeless(run)}
    expected = {record["step"]: record for record in read_jsonl(run / "whole.jsonl")}
    assert steps.keys() == expected.keys() >= {1, 2, 3, 4}
    if name == "grpo":  # what was in flight may be generated anew, with the newer weights
        return
    for step in (3, 4):
        for metric in ("loss", "grad_norm", "reward/mean"):
            for full in (n for n in expected[step] if n.endswith(metric)):
                assert steps[step][full] == pytest.approx(expected[step][full], rel=1e-4, abs=1e-6), full
