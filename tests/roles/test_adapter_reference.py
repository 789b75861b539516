from dataclasses import replace

import pytest
import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.roles.batching import micro_batches
from aligner.roles.policy import AdapterReference, Policy
from tests.megatron.models import build, nll_loss, shares
from tests.ranks import on_ranks
from tests.tiny import ADAM, MODELS, MOE, batch, wild_source

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=2, alpha=8)
CASES = {
    "llama": (MODELS["llama"], LORA, 1),
    "experts": (MOE, LORA, 1),
    "dora, two ranks": (MODELS["qwen3"], replace(LORA, dora=True), 2),
}


ROWS = BatchConfig(share_prompts=False)


@pytest.mark.parametrize("own_factors", [False, True])
@pytest.mark.parametrize(("cfg", "lora", "world"), CASES.values(), ids=CASES)
@on_ranks()
def test_the_reference_is_what_training_began_with(cfg, lora, world, own_factors):
    """Bit by bit, whatever has been learnt; and the policy has it again afterwards. `own_factors` change the
    model from the start."""
    cfg = replace(cfg, lora=lora)
    model, full = build(cfg, ParallelConfig(tensor=world), ADAM), batch(cfg)
    if own_factors:
        model.adapted.start_from(wild_source(cfg))
    policy, reference = Policy(model, ROWS), AdapterReference(model, ROWS)
    parts, params = micro_batches(shares(model, full), ROWS), [param for _, param in model.adapted.named()]
    first = policy.logprobs(full)
    assert torch.equal(reference.logprobs(full), first)
    for _ in range(3):
        model.step(parts, nll_loss(model, full))
    learnt = [param.clone() for param in params]
    assert (policy.logprobs(full) - first).abs().max() > 1e-3
    assert torch.equal(reference.logprobs(full), first) and all(map(torch.equal, learnt, params))
    assert model.step(parts, nll_loss(model, full))["grad_norm"] > 0
    assert bool(sum(t.numel() for t in model.adapted.start)) == own_factors
