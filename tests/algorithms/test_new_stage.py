"""A stage is its file, its conf and nothing else: one that the project does not have."""

import json
import subprocess
import sys

import pytest

from tests import stages

STAGE = """
from dataclasses import dataclass, replace

from aligner.config.key import Section, key
from aligner.config.stage import Stage

if __package__ == "aligner.stages":
    from aligner.builders.data import make_batches, rows_of
    from aligner.builders.models import make_policy, make_reference
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.data.collate import collate_sft
    from aligner.data.dataset import SftDataset
    from aligner.data.formats import sft_rows
    from aligner.stages.sft import sft_loss


@dataclass
class SharpConfig(Section, key="stage.sharp"):
    scale: float = key(1.0, "Factor of the loss.", above=0)


STAGE = Stage(other_models=lambda cfg: ("reference",), section=SharpConfig)


def main(job):
    cfg = job.cfg
    rows = SftDataset(sft_rows(rows_of(job, cfg.data.train, "data.train"), cfg.data), job.tokenizer, cfg.data, "x")
    batches = make_batches(job, rows, collate_sft)
    policy, reference = make_policy(job, cfg.run.steps), make_reference(job)
    run = make_run(job, {"policy": policy.model}, {"data": batches.stream})
    with saved_first(run):
        for step in run.steps():
            batch = batches.next()
            mean = sft_loss(batch, policy.model.layout.pgs.dp)

            def loss(out, part):
                found = mean(out, part)
                return replace(found, loss=found.loss * cfg.stage.sharp.scale)

            far = float((policy.logprobs(batch) - reference.logprobs(batch)).abs().max())
            run.finish(step, policy.update(batch, loss) | {"sharp/far": far}, tokens=1.0, rows=1)
    finish(job, run, policy.model)
"""
PROGRAM = """
import sys
folder, *arguments = sys.argv[1:]
import aligner.stages
aligner.stages.__path__.append(f"{folder}/stages")
from aligner.__main__ import main
scale = ["--config-dir", f"{folder}/conf", "stage.sharp.scale="]
for command, value in (("run", "2"), ("run", "-2"), ("run", "3"), ("plan", "2")):
    print(f"-> {main([command, *arguments, *scale[:2], scale[2] + value])}", flush=True)
"""


@pytest.mark.slow
def test_a_new_stage_is_one_file_and_its_defaults(tiny_data, tmp_path):
    for name, text in {
        "stages/sharp.py": STAGE,
        "conf/stage/sharp.yaml": "# @package _global_\nstage:\n  name: sharp\nrun:\n  steps: 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = tmp_path / "run"
    line = [word.replace("stage=sft", "stage=sharp") for word in stages.overrides("sft", tiny_data, run)]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), *line, "model.vocab_size=300"]
    done = subprocess.run(command, cwd=stages.ROOT, capture_output=True, text=True)
    codes = [text.split()[1] for text in done.stdout.splitlines() if text.startswith("->")]
    assert codes == ["0", "2", "2", "0"], done.stdout + done.stderr
    assert (run / "DONE").read_text() == "sharp\n" and (run / "hf/config.json").exists()
    records = [record["sharp/far"] for record in stages.records(run)]
    assert records[0] == 0 and records[1] > 0  # a reference of its own, which stays where it was
    state = json.loads((run / "checkpoints/step-00000002/state.json").read_text())
    assert state["identity"]["stage"] == "sharp" and state["definition"]["stage.sharp.scale"] == 2.0
    assert "stage.sharp.scale=-2" in done.stderr
    assert "belongs to another run: stage.sharp.scale is 2.0 there, 3.0 here" in done.stderr
    assert "sharp" in (run / "config.yaml").read_text() and "reference" in done.stdout
