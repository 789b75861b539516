"""Engines on ranks of their own (engine.ranks): the numbers are those of engines on the trainer's ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import stages
from tests.run import jobs

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STAGE = jobs.run_stage
# sampled tokens and what follows from them alone; other numbers differ by rounding
EXACT = ("reward/", "response/", "advantage/", "refit/version", "staleness/")


def train(ranks, data, folder, world, *overrides):
    settings = stages.overrides("grpo", data, folder, "run.steps=3", "run.export=true", *overrides)
    assert ranks.run(STAGE, world=world, arguments=settings) == [0] * world
    return folder


def test_one_trainer_and_one_engine_are_one_rank(ranks, tiny_data, tmp_path):
    """Rewards, responses, losses, sentinel, evaluation and weights, bit by bit. After an evaluation the engine holds
    the weights of the next rollout already."""
    overrides = ["algorithm.kl.coef=0.01", "refit.verify=checksum", "sampling.top_p=0.9"]
    overrides += ["run.eval_every=1", f"data.eval={tiny_data / 'eval.jsonl'}"]
    together = train(ranks, tiny_data, tmp_path / "together", 1, *overrides)
    apart = train(ranks, tiny_data, tmp_path / "apart", 2, "engine.ranks=1", *overrides)
    assert stages.differences(together, apart) == []
    assert stages.same_weights(together, apart)


@pytest.mark.parametrize(
    "layout, engines, width",
    [("tensor", 1, 1), ("pipeline", 2, 2), ("", 2, 1)],
    ids=["tp2 to 1", "pp2 to 1 x tp2", "dp2 to 2"],
)
def test_engines_apart_train_two_ranks_as_engines_on_them_do(ranks, tiny_data, tmp_path, layout, engines, width):
    """As with engines on the trainer's ranks, but for the rounding of other batches."""
    parallel = [f"parallel.{layout}=2"] if layout else []
    parallel.append("run.steps=2")
    own = [f"engine.ranks={engines}", f"engine.tensor_parallel={width}"]
    together = train(ranks, tiny_data, tmp_path / "together", 2, *parallel)
    apart = train(ranks, tiny_data, tmp_path / "apart", 2 + engines, *parallel, *own)
    assert any(record["reward/mean"] > 0 for record in stages.records(apart))
    for one, two in zip(stages.records(together), stages.records(apart), strict=True):
        for name, value in one.items():
            if name.startswith(EXACT):
                assert two[name] == value, name
            elif name.startswith(("policy/", "kl/")):
                assert two[name] == pytest.approx(value, abs=1e-5), name
        assert two["refit/sentinel_error"] < 1e-5
        assert two["refit/wire_bytes"] == two["refit/bytes"] == pytest.approx(one["refit/bytes"] / width, rel=0.1)
    left, right = stages.weights(together), stages.weights(apart)
    assert all((left[name] - right[name]).abs().max() < 1e-4 for name in left)


@pytest.mark.parametrize(
    "world, own",
    [
        (2, ["engine.ranks=1"]),
        (2, ["engine.ranks=1", "model.dtype=bfloat16", "engine.dtype=float32"]),
        (4, ["engine.ranks=2", "engine.tensor_parallel=2", "parallel.pipeline=2", "engine.dtype=bfloat16"]),
    ],
    ids=["float32", "bfloat16 to float32", "pp2 in float32 to tp2 in bfloat16"],
)
def test_factors_are_enough_for_engines_that_merge_adapters(ranks, tiny_data, tmp_path, world, own):
    overrides = [*own, "model.lora.rank=2", "model.lora.dora=true", "optim.lr=1e-2", "refit.verify=checksum"]
    merged = train(ranks, tiny_data, tmp_path / "merged", world, *overrides)
    factors = train(ranks, tiny_data, tmp_path / "factors", world, *overrides, "refit.adapters=factors")
    assert stages.differences(merged, factors) == [] and stages.same_weights(merged, factors)
    first, *others = [
        (one["refit/wire_bytes"], two["refit/wire_bytes"])
        for one, two in zip(stages.records(merged), stages.records(factors), strict=True)
    ]
    assert first[1] > first[0] and all(sent < whole / 2 for whole, sent in others)


def test_a_run_that_was_cut_off_resumes_bit_for_bit(ranks, tiny_data, tmp_path):
    """Engines keep nothing: the first refit after the restart (for step 4: the rollout of 3 is stored) brings the
    weights."""
    settings = ["engine.ranks=1", "checkpoint.every=2", "run.steps=4", "model.dtype=bfloat16", "optim.lr=1e-6"]
    whole = train(ranks, tiny_data, tmp_path / "whole", 2, *settings)
    settings += ["run.export=true"]
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "cut", *settings)
    results = ranks.run(jobs.played, world=2, arguments=arguments, cut=3)
    assert [one.end for one in results] == ["cut", "1"] and stages.checkpoints(tmp_path / "cut") == [2]
    assert ranks.run(STAGE, world=2, arguments=arguments) == [0, 0]
    assert stages.differences(whole, tmp_path / "cut") == [] and stages.same_weights(whole, tmp_path / "cut")


def test_an_engine_that_fails_ends_the_run_with_its_cause(ranks, tiny_data, tmp_path):
    """The trainer's ranks save the last whole step first."""
    settings = ["run.steps=3", "engine.ranks=1", "checkpoint.every=9"]
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "run", *settings)
    results = ranks.run(jobs.played, world=2, arguments=arguments, engine_fails=2)
    assert [one.end for one in results] == ["EngineError: rollout 2: on rank 1: no answer from the device", "1"]
    assert stages.checkpoints(tmp_path / "run") == [1]
    (results, _) = ranks.run(jobs.played, world=2, arguments=[*arguments, "run.export=true"])
    assert results.end == "0" and "WARNING" not in results.out
    whole = train(ranks, tiny_data, tmp_path / "whole", 2, *settings)
    assert stages.differences(whole, tmp_path / "run") == [] and stages.same_weights(whole, tmp_path / "run")


def test_a_killed_engine_ends_the_job_which_then_goes_on(ranks, tiny_data, tmp_path):
    """`launch` names the rank that was killed, soon; the second start comes to its end."""
    run_dir = tmp_path / "run"
    settings = stages.overrides("grpo", tiny_data, run_dir, "engine.ranks=1", "checkpoint.every=2", "run.steps=9999")
    command = [sys.executable, "-m", "aligner", "launch", "--ranks", "2", *settings]
    job = subprocess.Popen(command, cwd=stages.ROOT, stderr=subprocess.PIPE, text=True)
    while job.poll() is None and not stages.checkpoints(run_dir):
        time.sleep(0.1)
    _, engine = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(engine), signal.SIGKILL)
    _, output = job.communicate(timeout=500)  # less than cluster.timeout_s
    assert job.returncode == 137
    assert "rank 1 of 2 failed first (signal SIGKILL)" in output
    again = stages.overrides(
        "grpo", tiny_data, run_dir, "engine.ranks=1", f"run.steps={stages.checkpoints(run_dir)[-1] + 1}"
    )
    assert ranks.run(STAGE, world=2, arguments=again) == [0, 0] and (run_dir / "DONE").exists()
