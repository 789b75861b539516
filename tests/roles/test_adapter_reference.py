from dataclasses import replace

import pytest
import torch

from aligner.config.schema import ParallelConfig
from aligner.config.sections.model.lora import LoraConfig
from tests.tiny import MODELS, MOE

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=2, alpha=8)
CASES = {
    "llama": (MODELS["llama"], LORA, ParallelConfig()),
    "experts": (MOE, LORA, ParallelConfig()),
    "dora, two ranks": (MODELS["qwen3"], replace(LORA, dora=True), ParallelConfig(tensor=2)),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_what_training_began_with(ranks, name, given):
    """Bit by bit, whatever has been learnt; and the policy has it again afterwards."""
    cfg, lora, parallel = CASES[name]
    cfg = replace(cfg, lora=lora)
    job = {"cfg": cfg, "parallel": parallel, "given": given}
    for found in ranks.run("tests.roles.adapter_jobs:before_and_after", parallel.tensor, **job):
        assert torch.equal(found["reference"], found["first"])
        assert torch.equal(found["later"], found["first"])
        assert (found["policy"] - found["first"]).abs().max() > 1e-3
        assert found["kept"] and found["trains on"]
        assert bool(found["extra"]) == given
