"""A critic on the policy's trunk: frozen weights that are in memory once."""

from dataclasses import replace

import pytest
import torch

from aligner.config.schema import ParallelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.plan.adapters import trained_parameters
from aligner.plan.job import Part
from aligner.plan.shapes import Grid
from aligner.plan.sizes import weight_bytes
from aligner.run.phases import RULES
from tests.tiny import MODELS, MOE

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=2, alpha=8)
CASES = {
    "llama": (MODELS["llama"], LORA, {}),
    "bfloat16, dora": (MODELS["qwen3"], replace(LORA, dora=True), {"dtype": torch.bfloat16}),
    "nf4": (MODELS["qwen2"], replace(LORA, quantize_base="nf4"), {}),
    "experts, int8": (MOE, replace(LORA, quantize_base="int8"), {"parallel": ParallelConfig(expert=2)}),
    "two tensor ranks": (MODELS["qwen2"], LORA, {"parallel": ParallelConfig(tensor=2, sequence=True)}),
    "two stages": (MODELS["llama"], LORA, {"parallel": ParallelConfig(pipeline=2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_critic_on_the_trunk_is_one_with_weights_of_its_own(ranks, name):
    """Bit by bit, and so is the policy beside it; also over weights that go away."""
    cfg, lora, how = CASES[name]
    cfg, parallel = replace(cfg, lora=lora), how.get("parallel", ParallelConfig())
    world = parallel.tensor * parallel.pipeline * parallel.expert
    part = Part("critic", cfg, "score", trained=True, shared=True)
    for found in ranks.run("tests.roles.adapter_jobs:on_the_trunk", world, cfg=cfg, **how):
        (metrics, logprobs, values), (wanted, own_logprobs, own_values) = found["together"], found["apart"]
        assert metrics == wanted and torch.equal(logprobs, own_logprobs) and torch.equal(values, own_values)
        assert all(metrics[i + 4]["loss"] < metrics[i]["loss"] for i in (0, 1)) and values.std() > 1e-3
        grid = Grid(parallel.tensor, parallel.pipeline, 1, parallel.expert, world // parallel.model_size)
        count = trained_parameters(part, grid, found["stage"])
        assert found["frozen"] and found["own"] == count.total
        # Megatron lets tensors begin at multiples of 64 numbers
        padding = found["bytes"] - weight_bytes(count, 2 if "dtype" in how else 4)
        assert 0 <= padding <= 4 * 64 * (found["tensors"] + 8)


def test_who_reads_the_critic_reads_the_policy():
    """So a trunk that is away with the policy's weights is here when the critic needs it."""
    assert all("policy" in rule.weights for rule in RULES.values() if "critic" in rule.weights)
