"""Plans at work over gloo: any layouts, any ranks; what fails on one rank; what never comes."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.parallel import ParallelConfig
from aligner.models.families import family_table
from aligner.models.params import to_hf
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.refit.plan import EngineGrid, TrainerGrid
from tests.tiny import DEEPSEEK, LLAMA, MODELS, MOE, wild_source

pytestmark = pytest.mark.multirank


def truth(cfg, dtype=torch.float32) -> dict[str, int]:
    source = wild_source(cfg)
    full = {name: t for spec in family_table(cfg) for name, t in to_hf(spec, source(spec), cfg).items()}
    kept = {name: spec.kept(dtype) for spec in family_table(cfg) for name in spec.hf}
    return {name: tensor_checksum(t.to(kept[name])) for name, t in full.items()}


LATENT = replace(DEEPSEEK, num_layers=4)
UNTIED, QWEN2 = (replace(cfg, tie_embeddings=False) for cfg in (LLAMA, MODELS["qwen2"]))
CASES = {  # world, model, trainer, engines, bucket bytes, engine's dtype
    "tp2 to 2 engines": (2, QWEN2, TrainerGrid(2, 2), EngineGrid((0, 1)), 3000, torch.float32),
    "pp2 to tp2": (2, MODELS["qwen3"], TrainerGrid(2, 1, 2), EngineGrid((0, 1), 2), 20, torch.float32),
    "dp2 to tp2, nothing on the wire": (2, LLAMA, TrainerGrid(2, data=2), EngineGrid((0, 1), 2), 99, torch.bfloat16),
    "tp2 pp2 to 2 x tp2": (4, MODELS["qwen3"], TrainerGrid(2, 2, 2), EngineGrid((0, 1, 2, 3), 2), 9999, torch.float32),
    "ep2 tp2 to 4": (4, MOE, TrainerGrid(2, 2, data=2, expert=2), EngineGrid((0, 1, 2, 3)), 5000, torch.float32),
    # the bias of the choice stays float32 on the way to an engine in bfloat16
    "latent, pp2 to 2": (2, LATENT, TrainerGrid(4, 1, 2), EngineGrid((0, 1)), 5000, torch.bfloat16),
    "other ranks, tp2 to tp2": (4, LLAMA, TrainerGrid(2, 2), EngineGrid((2, 3), 2), 5000, torch.bfloat16),
    "other ranks, dp2 to 2": (4, UNTIED, TrainerGrid(2, data=2, first=1), EngineGrid((3, 0)), 4000, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_hold_the_trainers_weights(ranks, name):
    world, cfg, trainer, engines, bucket_bytes, dtype = CASES[name]
    job = {"cfg": cfg, "trainer": trainer, "engines": engines, "bucket_bytes": bucket_bytes, "dtype": dtype}
    told = ranks.run("tests.refit.jobs:placed", world=world, rounds=2, **job)
    wanted = truth(cfg, dtype)
    for rank, found in enumerate(told):
        assert (found is not None) == (rank in engines.ranks)
        if found is not None:
            assert found["checksums"] == wanted and found["version"] == 1
            assert found["buffers"] <= 4 * max(bucket_bytes, 4096), "two to send, two to receive"
            assert found["made"] == 2 * found["buffers"] and not found["kept"], "two runs"
            apart = rank not in range(trainer.first, trainer.first + trainer.size)
            assert (found["copied"] == 0) == apart and (found["received"] > 0 or not apart)
    if "nothing" in name:
        assert all(found["received"] == found["buffers"] == 0 for found in told)


@pytest.mark.parametrize(
    "fault, text",
    [
        ("doubled", "doubled: model.layers.1.mlp.up_proj.weight"),
        ("missing", "missing: model.layers.1.mlp.up_proj.weight"),
        ("half", "incomplete: model.layers.1.mlp.up_proj.weight [24:48]"),
        ("broken", "no memory left"),
    ],
)
def test_a_fault_on_one_rank_stops_all(ranks, fault, text):
    job = {"cfg": LLAMA, "parallel": ParallelConfig(pipeline=2), "fault": fault}
    first, second = ranks.run("tests.refit.jobs:faulty", world=2, **job)
    assert first == second and first.startswith("refit failed on rank 1: ") and text in first


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_rank_that_never_comes_is_not_waited_for(ranks, how):
    """Within refit.timeout_s, and with the cause if the rank told one."""
    message = ranks.run("tests.refit.jobs:stuck", world=2, cfg=LLAMA, how=how)[0]
    if how == "raises":
        assert message == "refit failed on rank 1: someone divided by zero"
    else:
        assert message.startswith("refit failed on rank 0: weights did not arrive: a rank (one of 1) has ended")
