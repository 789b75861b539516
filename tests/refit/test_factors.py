"""Engines that merge adapters themselves: to the bit what merged weights are, for a part of the bytes."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA, MODELS, MOE, MORE

pytestmark = pytest.mark.multirank
JOBS = "tests.refit.factor_jobs"
LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
SOME = replace(LLAMA, lora=replace(LORA, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))
DORA = replace(MODELS["qwen2"], lora=replace(LORA, dora=True, targets=["k_proj", "o_proj", "gate_proj", "down_proj"]))
SPARSE, SPARSE_DORA = replace(MOE, lora=LORA), replace(MOE, lora=replace(LORA, dora=True))
TP2, PP2, EP2 = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(expert=2)
HALF, FULL = torch.bfloat16, torch.float32
CASES = {  # world, model, trainer's layout, engine's tensor ranks, dtype of the trainer, of the engine
    "tp2 to 2 engines, dora": (2, DORA, TP2, 1, FULL, FULL),
    "dp2 to tp2, dora": (2, DORA, ParallelConfig(), 2, HALF, HALF),
    "pp2 to tp2": (2, SOME, PP2, 2, FULL, HALF),
    "pp2 to 2 engines": (2, SOME, PP2, 1, HALF, FULL),
    "experts, ep2 to 2 engines": (2, SPARSE, EP2, 1, FULL, FULL),
    "experts, tp2 to tp2": (2, SPARSE, TP2, 2, HALF, HALF),
    "experts, ep2 tp2 to tp2, dora": (4, SPARSE_DORA, ParallelConfig(expert=2, tensor=2), 2, FULL, FULL),
    "latent, tp2 to 2 engines": (2, replace(MORE["deepseek_v3-direct"], lora=LORA), TP2, 1, FULL, FULL),
    "linear, tp2 to 2 engines": (2, replace(MORE["qwen3_next"], lora=LORA), TP2, 1, FULL, FULL),
    "nf4 base, pp2": (2, replace(SOME, lora=replace(SOME.lora, quantize_base="nf4")), PP2, 1, HALF, HALF),
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_merges_has_the_merged_weights_to_the_bit(ranks, name):
    world, cfg, parallel, tensor, dtype, engine_dtype = CASES[name]
    job = {"cfg": cfg, "parallel": parallel, "tensor": tensor, "dtype": dtype, "engine_dtype": engine_dtype}
    for told in ranks.run(f"{JOBS}:both", world=world, **job):
        sums = [turn["checksums"] for turn in told]
        for turn in told:
            assert turn["checksums"]["factors"] == turn["checksums"]["merged"] == turn["trainer"]
        changed = [name for name, value in sums[1]["merged"].items() if sums[0]["merged"][name] != value]
        assert changed and all("_proj" in name for name in changed), "the test has to tell turns apart"
        first, *others = [turn["metrics"] for turn in told]
        assert first["factors"]["refit/bytes"] > first["merged"]["refit/bytes"] / 2
        for found in others:
            wired = {way: metrics["refit/wire_bytes"] for way, metrics in found.items()}
            if wired["merged"]:  # else each rank holds what its engine needs of W
                assert 0 < wired["factors"] < wired["merged"]
            assert found["factors"]["refit/version"] == found["merged"]["refit/version"]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_torn_update_is_of_no_use_and_the_next_one_mends_it(ranks, name):
    """Of a matrix with adapters, and of one without. Until a refit has succeeded on every rank the frozen weights
    travel again; from then on factors are enough."""
    one, other = ranks.run(f"{JOBS}:torn", world=2, cfg=SOME, parallel=PP2, name=name)
    for found in (one, other):
        assert found["right"] == [True] * 3
        whole, *later = found["bytes"]
        assert later[0] == later[1] < whole / 3
        *refused, lost = found["messages"]
        assert refused == ["refit failed on rank 1: no memory left"] * 2
        told = "did not come as it should: missing: model.layers.1.mlp.up_proj.lora_B.weight"
        assert lost.startswith("refit failed on rank 1: ") and lost.endswith(told)
    assert other["versions"] == [-1, 0, 1]
