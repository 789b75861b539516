"""What leaves the device comes back as it was, and training does not notice."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA, MODELS, MOE

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-2)
PLAIN = replace(OPTIM, distributed=False)
ONE, TP, PP = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2)
EP = ParallelConfig(expert=2)


@pytest.mark.parametrize(
    "world, parallel, cfg, dtype, optim, score",
    [
        (1, ONE, LLAMA, torch.float32, OPTIM, False),
        (1, ONE, LLAMA, torch.float32, PLAIN, False),
        (1, ONE, MODELS["qwen3"], torch.bfloat16, PLAIN, False),
        (1, ONE, LLAMA, torch.bfloat16, OPTIM, True),
        (2, ONE, LLAMA, torch.bfloat16, OPTIM, False),
        (2, PP, LLAMA, torch.float32, OPTIM, False),
        (2, EP, MOE, torch.float32, OPTIM, False),
    ],
)
def test_training_does_not_notice(ranks, world, parallel, cfg, dtype, optim, score):
    job = {"cfg": cfg, "parallel": parallel, "dtype": dtype, "optim": optim, "score": score}
    for out in ranks.run("tests.megatron.offload_jobs:round_trip", world=world, **job):
        assert all(out["same"])
        assert all(still == moved for still, moved in out["metrics"])
        assert all(size == 0 for sizes in out["away"] for size in sizes.values())
        for sizes in out["sizes"]:
            assert sizes["weights"] and sizes["gradients"]
            width = 2 if dtype == torch.bfloat16 and not score else 1  # gradients are float32
            if not score:
                assert sizes["gradients"] >= sizes["weights"] * width * 0.99
        fresh, later = out["sizes"][0]["optimizer"], out["sizes"][1]["optimizer"]
        moments = 2 * out["sizes"][1]["gradients"] / (world if optim.distributed and parallel in (ONE, EP) else 1)
        assert later - fresh >= 0.9 * moments  # they come with the first step; padding belongs to nobody
        if dtype == torch.float32:
            assert fresh == 0  # the main parameters are the weights


def test_a_frozen_model_has_weights_alone(ranks):
    sizes, away, same = ranks.run("tests.megatron.offload_jobs:frozen", world=1, cfg=LLAMA, dtype=torch.float32)[0]
    assert sizes["weights"] and not sizes["gradients"] and not sizes["optimizer"]
    assert away == 0 and same
