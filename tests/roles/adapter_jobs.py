"""What the ranks run for `test_adapter_reference` and `test_trunk`."""

from __future__ import annotations

import torch

from aligner.config.schema import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.model import Head
from aligner.megatron.offload import ModelMemory
from aligner.roles.batching import micro_batches
from aligner.roles.critic import Critic
from aligner.roles.policy import AdapterReference, Policy
from tests.megatron.jobs import ONE, build, build_on, nll_loss, shares
from tests.tiny import ADAM, batch, wild_source

ROWS = BatchConfig(share_prompts=False)


def before_and_after(cfg: ModelConfig, parallel=ONE, given: bool = False) -> dict:
    """Logprobs of the reference before any step and after some, beside the policy's; factors that are `given` change
    the model from the start."""
    model = build(cfg, parallel, ADAM)
    if given:
        model.adapted.start_from(wild_source(cfg))
    policy, reference = Policy(model, ROWS), AdapterReference(model, ROWS)
    full, mine = batch(cfg), shares(model, batch(cfg))
    params = [param for _, param in model.adapted.named()]
    found = {"first": policy.logprobs(full), "reference": reference.logprobs(full)}
    for _ in range(3):
        model.step(micro_batches(mine, ROWS), nll_loss(model, full))
    learnt = [param.clone() for param in params]
    found |= {"policy": policy.logprobs(full), "later": reference.logprobs(full)}
    found["kept"] = all(map(torch.equal, learnt, params))
    found["trains on"] = model.step(micro_batches(mine, ROWS), nll_loss(model, full))["grad_norm"] > 0
    found["extra"] = sum(t.numel() for t in model.adapted.start)
    return found


def on_the_trunk(cfg: ModelConfig, parallel=ONE, dtype: torch.dtype = torch.float32) -> dict:
    """Three steps of a policy and a critic on its trunk, which go away and come back between them, and of both with
    weights of their own."""
    policy, apart = (build(cfg, parallel, ADAM, dtype=dtype) for _ in range(2))
    critic, alone = build_on(policy), build(cfg, parallel, ADAM, Head("score"), dtype)
    memories, full = [ModelMemory(policy), ModelMemory(critic)], batch(cfg)
    theirs = set(policy.module.parameters())
    shared = [p for p in critic.module.parameters() if p in theirs]
    found = {"stage": policy.layout.pp_rank, "bytes": memories[1].held_bytes("weights")}
    for name, models in {"together": (policy, critic), "apart": (apart, alone)}.items():
        metrics = []
        for _ in range(3):
            for model in models:
                metrics.append(model.step(micro_batches(shares(model, full), ROWS), nll_loss(model, full)))
                for memory in memories:
                    memory.leave("weights")
                for memory in reversed(memories):
                    memory.come_back("weights")
        found[name] = metrics, Policy(models[0], ROWS).logprobs(full), Critic(models[1], ROWS).values(full)
    return found | {
        "own": sum(p.numel() for p in critic.module.parameters() if p not in theirs),
        "tensors": len(list(critic.module.parameters())) - len(shared),
        "frozen": all(not p.requires_grad and p.grad is None for p in shared),
    }
