"""A critic on the policy's trunk: frozen weights that are in memory once."""

from dataclasses import replace

import pytest
import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.megatron.model import Head
from aligner.megatron.offload import ModelMemory
from aligner.plan.adapters import trained_parameters
from aligner.plan.job import PlannedModel
from aligner.plan.shapes import Grid
from aligner.plan.sizes import weight_bytes
from aligner.roles.batching import micro_batches
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy
from aligner.run.phases import RULES
from tests.megatron.models import ONE, build, build_on, nll_loss, shares
from tests.ranks import on_ranks
from tests.tiny import ADAM, MODELS, MOE, batch

pytestmark = pytest.mark.multirank
ROWS = BatchConfig(share_prompts=False)
LORA = LoraConfig(rank=2, alpha=8)
CASES = {
    "llama": (MODELS["llama"], LORA, 1, {}),
    "bfloat16, dora": (MODELS["qwen3"], replace(LORA, dora=True), 1, {"dtype": torch.bfloat16}),
    "nf4": (MODELS["qwen2"], replace(LORA, quantize_base="nf4"), 1, {}),
    "experts, int8": (MOE, replace(LORA, quantize_base="int8"), 2, {"parallel": ParallelConfig(expert=2)}),
    "two tensor ranks": (MODELS["qwen2"], LORA, 2, {"parallel": ParallelConfig(tensor=2, sequence=True)}),
    "two stages": (MODELS["llama"], LORA, 2, {"parallel": ParallelConfig(pipeline=2)}),
}


@pytest.mark.parametrize(("cfg", "lora", "world", "how"), CASES.values(), ids=CASES)
@on_ranks()
def test_a_critic_on_the_trunk_is_one_with_weights_of_its_own(cfg, lora, world, how):
    """Three steps of a policy and a critic, which go away and come back between them, are bit by bit those of both with
    weights of their own."""
    cfg, parallel, dtype = replace(cfg, lora=lora), how.get("parallel", ONE), how.get("dtype", torch.float32)
    policy, apart = (build(cfg, parallel, ADAM, dtype=dtype) for _ in range(2))
    critic, alone = build_on(policy), build(cfg, parallel, ADAM, Head("score"), dtype)
    memories, full = [ModelMemory(policy), ModelMemory(critic)], batch(cfg)
    held, trunk = memories[1].held_bytes("weights"), set(policy.module.parameters())

    def three_steps(models):
        metrics = []
        for _ in range(3):
            for model in models:
                metrics.append(model.step(micro_batches(shares(model, full), ROWS), nll_loss(model, full)))
                for memory in memories:
                    memory.offload("weights")
                for memory in reversed(memories):
                    memory.restore("weights")
        return metrics, Policy(models[0], ROWS).logprobs(full), Critic(models[1], ROWS).values(full)

    metrics, logprobs, values = three_steps((policy, critic))
    wanted, own_logprobs, own_values = three_steps((apart, alone))
    assert metrics == wanted and torch.equal(logprobs, own_logprobs) and torch.equal(values, own_values)
    assert all(metrics[i + 4]["loss"] < metrics[i]["loss"] for i in (0, 1)) and values.std() > 1e-3

    own = [p for p in critic.module.parameters() if p not in trunk]
    shared = [p for p in critic.module.parameters() if p in trunk]
    assert all(not p.requires_grad and p.grad is None for p in shared)
    grid = Grid(parallel.tensor, parallel.pipeline, 1, parallel.expert, world // parallel.model_size)
    planned = PlannedModel("critic", cfg, "score", trained=True, shared=True)
    count = trained_parameters(planned, grid, policy.layout.pp_rank)
    assert sum(p.numel() for p in own) == count.total
    # Megatron lets tensors begin at multiples of 64 numbers
    assert 0 <= held - weight_bytes(count, dtype.itemsize) <= 4 * 64 * (len(own) + 8)


def test_who_reads_the_critic_reads_the_policy():
    """So a trunk that is away with the policy's weights is here when the critic needs it."""
    assert all("policy" in rule.weights for rule in RULES.values() if "critic" in rule.weights)
