"""Low-rank adapters on every layout, against one rank, against autograd, and against the merged weights."""

import math
from dataclasses import replace

import pytest
import torch

from aligner.config.schema import ParallelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.model import Head
from aligner.models.adapters import adapter_table
from tests.tiny import LLAMA, MODELS, MOE, MORE, relative

pytestmark = pytest.mark.multirank
JOBS = "tests.megatron.lora_jobs"
LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
SOME = replace(LLAMA, lora=replace(LORA, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))
RSLORA = replace(SOME, lora=replace(SOME.lora, rslora=True))
DORA = replace(MODELS["qwen2"], lora=replace(LORA, dora=True, targets=["k_proj", "o_proj", "gate_proj", "down_proj"]))
SPARSE = replace(MOE, lora=LORA)
SPARSE_DORA = replace(MOE, lora=replace(DORA.lora, targets=["q_proj", "up_proj", "down_proj"]))
PP2 = ParallelConfig(pipeline=2)
TP2, SP2 = ParallelConfig(tensor=2), ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {
    "some": (SOME, (TP2, SP2, ParallelConfig(context=2), ParallelConfig())),
    "some, recomputed": (replace(SOME, recompute="full"), (PP2, ParallelConfig())),
    "dora": (DORA, (TP2, SP2)),
    "experts": (SPARSE, (SP2, ParallelConfig(expert=2))),
    "dora of experts": (SPARSE_DORA, (TP2, ParallelConfig(expert=2))),
    "latent": (replace(MORE["deepseek_v3-direct"], lora=LORA), (SP2,)),
    "linear": (replace(MORE["qwen3_next"], lora=LORA), (SP2,)),
}


@pytest.fixture
def run(ranks):
    return lambda function, world=1, **arguments: ranks.run(f"{JOBS}:{function}", world=world, **arguments)


@pytest.mark.few(3)
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


@pytest.mark.parametrize("cfg", [SOME, DORA, SPARSE, SPARSE_DORA, RSLORA])
def test_merged_weights_say_what_the_adapters_say(run, cfg):
    ((adapted, merged),) = run("merged_is_adapted", cfg=cfg)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "cfg",
    [SOME, RSLORA, DORA, SPARSE, SPARSE_DORA],
    ids=["lora", "rslora", "dora", "experts", "dora of experts"],
)
def test_gradients_are_those_of_the_whole_weights_by_the_chain_rule(run, cfg):
    """y = W' x with W' = W + s B A, so dA = s B^T dW' and dB = s dW' A^T; with DoRA W' = (m / |V|) V with |V| held
    constant, so dm = sum dW' V / |V| along a row, and V's gradient is m / |V| times that of W'."""
    (found,) = run("gradients", cfg=cfg)
    factors = {n: t.double() for n, t in found["factors"].items()}
    scale = cfg.lora.alpha / (math.sqrt(cfg.lora.rank) if cfg.lora.rslora else cfg.lora.rank)
    modules = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    for module in modules:
        a, b = factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"]
        d = found["of_weights"][f"{module}.weight"].double()
        wanted = {}
        if cfg.lora.dora:
            v = found["base"][f"{module}.weight"].double() + scale * b @ a
            norm = v.norm(dim=1)
            wanted["lora_magnitude_vector"] = (d * v).sum(1) / norm
            d = d * (factors[f"{module}.lora_magnitude_vector"] / norm)[:, None]
        wanted |= {"lora_A.weight": scale * b.T @ d, "lora_B.weight": scale * d @ a.T}
        for name, gradient in wanted.items():
            assert relative(found["of_factors"][f"{module}.{name}"], gradient) < 2e-3, (module, name)
            assert gradient.norm() > 1e-4


def test_a_checkpoint_holds_adapters_alone_and_goes_on_to_the_bit(run, tmp_path):
    (found,) = run("resumed", cfg=DORA, folder=str(tmp_path))
    (metrics, factors), (again, others) = found["straight"], found["again"]
    assert metrics == again and all(torch.equal(factors[name], t) for name, t in others.items())
    held = {key.removeprefix("optimizer.state.") for key in read_index(tmp_path).state_dict_metadata}
    names = {spec.canonical for spec in adapter_table(DORA)}
    wanted = {f"{prefix}{name}" for name in names for prefix in ("", "exp_avg.", "exp_avg_sq.")}
    assert {name for name in held if not name.startswith("common")} == wanted


@pytest.mark.parametrize("cfg, there, here", [(SOME, SP2, PP2), (SPARSE_DORA, ParallelConfig(expert=2), TP2)])
def test_another_layout_goes_on_from_a_checkpoint(run, tmp_path, cfg, there, here):
    found = run("resumed", world=2, cfg=cfg, folder=str(tmp_path), parallel=there, other=here)
    for mine in found:
        (metrics, factors), (again, others) = mine["straight"], mine["again"]
        assert again[-1]["loss"] == pytest.approx(metrics[-1]["loss"], rel=1e-5)
        both = factors.keys() & others.keys()
        assert both and max(relative(others[name], factors[name]) for name in both) < 2e-3


@pytest.mark.parametrize("parallel", [TP2, SP2])
def test_tensor_ranks_drop_alike_what_they_all_see(run, parallel):
    dropping = replace(SOME, lora=replace(SOME.lora, dropout=0.3))
    one, other = run("train", world=2, cfg=dropping, parallel=parallel, count=3)
    assert all(torch.equal(t, other["own"][name]) for name, t in one["own"].items())
    (plain,) = run("train", cfg=SOME, count=3)
    assert one["metrics"][-1]["loss"] != pytest.approx(plain["metrics"][-1]["loss"], rel=1e-3)
