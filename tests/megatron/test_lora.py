"""Low-rank adapters on every layout, against one rank, against autograd, and against the merged weights."""

from dataclasses import replace

import pytest
import torch

from aligner.config.schema import ParallelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.megatron.model import Head
from aligner.models.adapters import adapter_table
from tests.tiny import LLAMA, MODELS, MOE, MORE, relative

JOBS = "tests.megatron.lora_jobs"
LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
SOME = replace(LLAMA, lora=replace(LORA, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))
DORA = replace(MODELS["qwen2"], lora=replace(LORA, dora=True, targets=["k_proj", "o_proj", "gate_proj", "down_proj"]))
SPARSE = replace(MOE, lora=LORA)
TP2, SP2 = ParallelConfig(tensor=2), ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {
    "some": (SOME, (TP2, SP2, ParallelConfig(context=2), ParallelConfig())),
    "some, recomputed": (replace(SOME, recompute="full"), (ParallelConfig(pipeline=2),)),
    "dora": (DORA, (TP2, SP2)),
    "experts": (SPARSE, (SP2, ParallelConfig(expert=2))),
    "latent": (replace(MORE["deepseek_v3-direct"], lora=LORA), (SP2,)),
    "linear": (replace(MORE["qwen3_next"], lora=LORA), (SP2,)),
}


@pytest.fixture
def run(ranks):
    return lambda function, world=1, **arguments: ranks.run(f"{JOBS}:{function}", world=world, **arguments)


@pytest.mark.parametrize("name", LAYOUTS)
def test_five_steps_are_those_of_one_rank_on_every_layout(run, name):
    """The factors that all tensor ranks have whole stay the same to the bit: an error shows from the second step on."""
    cfg, layouts = LAYOUTS[name]
    (one,) = run("train", cfg=replace(cfg, recompute="none"))
    assert one["metrics"][-1]["loss"] < one["metrics"][0]["loss"] - 0.3
    assert one["metrics"][-1]["lora/b_norm"] > 0.1
    for parallel in layouts:
        found = run("train", world=2, cfg=cfg, parallel=parallel)
        for mine in found:
            for key in ("loss", "grad_norm", "lora/b_norm"):
                got, wanted = (m["metrics"][-1][key] for m in (mine, one))
                assert got == pytest.approx(wanted, rel=2e-4), (parallel, key)
        factors = {name: t for mine in found for name, t in mine["factors"].items()}
        worst = max((relative(factors[n], t), n) for n, t in one["factors"].items())
        assert worst[0] < 2e-3, (parallel, worst)  # Adam turns gradients of the size of rounding into steps
        if parallel.tensor > 1:
            assert found[0]["own"].keys() == found[1]["own"].keys() != set()
            assert all(torch.equal(t, found[1]["own"][n]) for n, t in found[0]["own"].items()), parallel


def test_gradients_and_optimizer_are_of_the_adapters_alone(run):
    (found,) = run("train", cfg=SOME, count=1)
    sizes = [torch.Size(spec.shape).numel() for spec in adapter_table(SOME)]
    numbers = sum(sizes)
    assert numbers <= found["gradient_numbers"] <= numbers + 64 * len(sizes)  # each begins at a multiple of 64
    (scores,) = run("train", cfg=SOME, count=1, head=Head("score", 2))
    assert scores["trained"] == numbers + 2 * SOME.hidden_size  # and the whole head


@pytest.mark.parametrize("cfg", [SOME, DORA, SPARSE, replace(SOME, lora=replace(SOME.lora, rslora=True))])
def test_merged_weights_say_what_the_adapters_say(run, cfg):
    ((adapted, merged),) = run("merged_is_adapted", cfg=cfg)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=2e-5)
