"""Weights that receivers read out of the senders' memory, with ranks of a real mpirun."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from aligner.__main__ import main
from aligner.builders.job import start
from aligner.cluster.env import RankEnv
from aligner.errors import ConfigError
from aligner.models.shards import hf_tensors
from aligner.refit.plan import EngineGrid, TrainerGrid, plan_refit
from aligner.refit.pull import LINE, slots
from tests import stages
from tests.needs import lacking
from tests.refit.test_changes import CASES, check_followed
from tests.tiny import LLAMA


def mpirun(ranks: int, *command: str) -> subprocess.CompletedProcess:
    if not shutil.which("mpirun"):
        lacking("no MPI library: apt-get install openmpi-bin")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    shared = {"ALIGNER_MPI": "mpirun", "MPI4PY_MPIABI": "openmpi", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        ["mpirun", *options, sys.executable, "-m", *command],
        cwd=stages.ROOT,
        env=os.environ | shared,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )


def test_who_needs_the_same_reads_the_same():
    """Every message has a place of its own in its source's memory, but for those that are equal."""
    plan = plan_refit(TrainerGrid(2, 1, 2), EngineGrid((2, 3)), hf_tensors(LLAMA), 2, 3000)
    starts, ends = slots(plan)
    places: dict = {}
    for message in (m for messages in plan.rounds for m in messages):
        start = starts[message.source, id(message.parts)]
        assert start % LINE == 0 and start + LINE + message.bytes <= ends[message.source]
        assert places.setdefault((message.source, start), message.parts) == message.parts
    messages = [m for messages in plan.rounds for m in messages]
    assert 2 * len(places) == len(messages), "each stage's by both engines"


@pytest.mark.slow
def test_windows_bring_what_messages_bring(tmp_path):
    """Whole and in part; and a rank that does not come is not waited for."""
    said = mpirun(3, "tests.refit.window_ranks", str(tmp_path)).stdout
    told = [torch.load(tmp_path / str(rank)) for rank in range(3)] if (tmp_path / "2").is_file() else said
    for name in set(told[0]) - {"late"}:
        check_followed([told[rank][name] for rank in CASES[name][3].ranks])
    assert len(told[0]) > 2
    for rank in (0, 1):
        message = told[rank]["late"]
        assert message.startswith("weights did not arrive: a rank (one of ")
        assert "refit.timeout_s=1 (MPI: " in message


@pytest.mark.slow
@pytest.mark.multirank
def test_a_run_is_the_same_bit_by_bit(tiny_data, tmp_path):
    more = ["run.steps=3", "run.export=true", "engine.ranks=1", "model.dtype=bfloat16", "refit.verify=checksum"]
    for name, transport in (("sent", "messages"), ("pulled", "mpi_window")):
        run = stages.overrides("grpo", tiny_data, tmp_path / name, *more, f"refit.transport={transport}")
        done = mpirun(2, "aligner", "run", *run)
        assert done.returncode == 0, done.stdout[-2000:]
    assert stages.differences(tmp_path / "sent", tmp_path / "pulled") == []
    assert stages.same_weights(tmp_path / "sent", tmp_path / "pulled")


def test_ranks_that_mpi_does_not_join_are_refused(tmp_path, capsys):
    """As they start, and before `launch` or `submit` starts them."""
    said = "refit.transport='mpi_window': expected messages where MPI does not join the ranks"
    cfg = SimpleNamespace(refit=SimpleNamespace(transport="mpi_window"), engine=SimpleNamespace(name="native"))
    with pytest.raises(ConfigError, match=said):
        start(cfg, RankEnv(world_size=2))
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    asked = ["stage=grpo", "model=tiny", f"data.train={data}", "reward.functions=[{path: math}]"]
    asked += [f"run.dir={tmp_path / 'run'}", "refit.transport=mpi_window", "batch.prompts=2"]
    for command in (["launch", "--ranks", "2"], ["submit", "--dry-run", "--ranks-per-node", "2"]):
        assert main([*command, *asked]) != 0
        assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
