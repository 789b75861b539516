"""Whole GRPO runs with vLLM in its own process: chosen by config, refitted, verified, and learning."""

from functools import partial
from unittest.mock import patch

import pytest

import aligner.engines.child.engine as child
from tests import stages
from tests.engines.vllm.lent import fork
from tests.engines.vllm.setup import needs_vllm, server
from tests.run.jobs import run_stage

pytestmark = [needs_vllm, pytest.mark.slow]
RUN = ["engine=vllm", "engine.kv_cache_bytes=16777216", "model.head_dim=32", "refit.verify=checksum"]
RUN += ["checkpoint.final=false", "run.export=false"]


def checked(run, steps: int) -> list[dict]:
    records = stages.records(run)
    assert [r["refit/version"] for r in records] == list(range(steps))
    assert all(r["refit/sentinel_error"] < 1e-4 and r["mismatch/logprob_abs_max"] < 1e-3 for r in records)
    assert all(abs(r["refit/sentinel_progress"] - 1) < 0.05 for r in records[1:])
    return [r["reward/mean"] for r in records]


@pytest.fixture(scope="module")
def train(tiny_data):
    def run(folder, *overrides):
        own = ["run.export=true", "checkpoint.every=10", "run.steps=12"]
        with patch.object(child, "spawn", partial(fork, server())):
            return stages.stage("grpo", tiny_data, folder, *RUN, *own, *overrides)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("vllm") / "run")


def test_grpo_learns(whole):
    rewards = checked(whole, 12)
    assert sum(rewards[-4:]) > sum(rewards[:4]) * 1.2, rewards


def test_a_run_that_is_resumed_is_the_same_bit_for_bit(train, whole, tmp_path):
    """Another process generates from step 11 on, of which nothing may depend."""
    resumed = train(tmp_path / "run", f"run.resume={whole / 'checkpoints/step-00000010'}")
    assert stages.timeless(resumed) == stages.timeless(whole)[10:]
    assert stages.same_weights(whole, resumed)


def forked(arguments: list[str], path: str) -> None:
    with patch.object(child, "spawn", partial(fork, path)):
        run_stage(arguments)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, ("engine.tensor_parallel=2",)), (3, ("engine.ranks=2", "engine.tensor_parallel=2")), (2, ())],
    ids=["tp2", "own-tp2", "two"],
)
def test_grpo_learns_on_several_ranks(ranks, tiny_data, tmp_path, world, layout):
    """One engine of both; one on two ranks of its own, which get their shares of the weights by the plan; one for
    each, which starts as a user's does."""
    line = stages.overrides("grpo", tiny_data, tmp_path / "run", *RUN, "run.steps=3", *layout)
    if not layout:
        ranks.run(run_stage, world=world, arguments=line)
    else:
        ranks.run(forked, world=world, arguments=line, path=server())
    checked(tmp_path / "run", 3)
