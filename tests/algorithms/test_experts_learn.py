"""A mixture of experts trains the quick start's task, made small: SFT on one rank, GRPO on two that share the experts.

Sums of two numbers from 10 to 29; 32 of these questions for GRPO, so that each step asks the same ones. Over two seeds
the mean reward gained 0.15 to 0.22; the bound is 0.07, three deviations of its noise (see test_recipes.py).
"""

import pytest

from aligner.config.sections.model.config import ModelConfig
from aligner.roles.model_init import resolve
from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

SHAPE = ["model.num_layers=2", "model.hidden_size=96", "model.moe.num_experts=4", "model.moe.ffn_hidden_size=96"]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Folder with few.jsonl (32 questions) and an SFT model with experts that answers about a quarter of them."""
    root = stages.make_sums(tmp_path_factory.mktemp("experts"), "[1-2]")
    batch = ["run.steps=130", "batch.sequences=64", "batch.micro_batch_samples=64", "optim.lr=4e-3"]
    stages.sums_model(root, "model=tiny_moe", *SHAPE, *batch)
    return root


def test_supervised_loss_falls_and_no_token_is_dropped(sums):
    records = stages.records(sums / "sft")
    assert records[0]["policy/loss"] > 5 and records[-1]["policy/loss"] < 1
    assert all(1 <= record["moe/balance"] < 4 and record["moe/dropped"] == 0 for record in records)
    assert records[-1]["moe/aux_loss"] < 1.2


def test_the_reward_rises_on_two_ranks_that_share_the_experts(ranks, sums):
    run = sums / "grpo"
    settings = ["experiment=quickstart_grpo", *stages.SUMS, "checkpoint.final=true", "run.export=false"]
    settings += [f"run.dir={run}", "parallel.expert=2"]
    settings += [f"model.init={sums / 'sft'}", f"data.train={sums / 'few.jsonl'}", "model.moe.aux_coef=0.001"]
    settings += ["batch.prompts=32", "batch.group=8", "batch.micro_batch_samples=128", "run.steps=12", "optim.lr=1e-3"]
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=settings) == [0, 0]
    records = stages.records(run)
    means = [record["reward/mean"] for record in records]
    print([round(mean, 2) for mean in means])
    assert sum(means[-3:]) / 3 - sum(means[:3]) / 3 > 0.07
    assert all(record["refit/sentinel_error"] < 1e-3 and record["moe/dropped"] == 0 for record in records)
    initial = resolve(ModelConfig(), str(run), seed=0)  # its checkpoint, there being no export
    assert initial.checkpoint is not None
    assert (initial.config.moe.num_experts, initial.config.moe.ffn_hidden_size) == (4, 96)
