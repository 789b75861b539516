"""torch's Adam in one pass: its update, and checkpoints of one that was not fused."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.optim import OptimConfig
from tests.tiny import MODELS, relative

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, schedule="linear", warmup_steps=2)
KINDS = pytest.mark.parametrize("distributed, dtype", [(True, torch.bfloat16), (False, torch.float32)])


@KINDS
def test_its_update_is_that_of_the_paper(ranks, distributed, dtype):
    optim = replace(OPTIM, distributed=distributed)
    job = {"cfg": MODELS["qwen3"], "optim": optim, "dtype": dtype, "steps": 5}
    (got,) = ranks.run("tests.megatron.adam_jobs:against_float64", world=1, **job)
    assert got["fused"] and all(got["fused"]) and got["steps"] == {5.0}
    assert 0 < got["gap"] <= 10  # two roundings a step


@KINDS
def test_a_checkpoint_of_one_that_was_not_fused_goes_on(ranks, tmp_path, distributed, dtype):
    job = {"cfg": MODELS["qwen3"], "optim": replace(OPTIM, distributed=distributed), "dtype": dtype}
    (got,) = ranks.run("tests.megatron.adam_jobs:from_one_that_was_not_fused", world=1, folder=tmp_path / "c", **job)
    assert got["fused"] and all(got["fused"])
    assert got["steps"] == {(3.0, torch.float32, True)} and got["shared"] == 0
    for name, wanted in got["loaded"][0].items():
        assert torch.equal(got["loaded"][1][name], wanted)
    for name, wanted in got["stepped"][0].items():
        assert relative(got["stepped"][1][name], wanted) <= (1e-6 if dtype == torch.float32 else 1e-2), name
