"""What the ranks run for `test_adapter_reference`."""

from __future__ import annotations

import torch

from aligner.config.schema import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.roles.batching import micro_batches
from aligner.roles.policy import AdapterReference, Policy
from tests.megatron.jobs import ONE, build, nll_loss, shares
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
