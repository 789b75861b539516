"""Low-rank adapters on every layout, against one rank, against autograd, and against the merged weights."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.optim import OptimConfig
from aligner.families.table import family_table
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import gather_weights
from aligner.models.adapters import adapter_table
from aligner.models.params import ParamSpec, to_hf
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from tests.megatron.models import ONE, build, nll_loss, same, shares, weights
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, MODELS, MOE, MORE, SGD, batch, relative

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
SOME = replace(LLAMA, lora=replace(LORA, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))
RSLORA = replace(SOME, lora=replace(SOME.lora, rslora=True))
DORA = replace(MODELS["qwen2"], lora=replace(LORA, dora=True, targets=["k_proj", "o_proj", "gate_proj", "down_proj"]))
SPARSE = replace(MOE, lora=LORA)
SPARSE_DORA = replace(MOE, lora=replace(DORA.lora, targets=["q_proj", "up_proj", "down_proj"]))
PP2, TURNS = ParallelConfig(pipeline=2), ParallelConfig(pipeline=2, virtual_stages=2)
TP2, SP2 = ParallelConfig(tensor=2), ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {
    "some": (SOME, (TP2, SP2, ParallelConfig(context=2), ParallelConfig())),
    "some, recomputed": (replace(SOME, recompute="full", num_layers=5), (TURNS, ParallelConfig())),
    "dora": (DORA, (TP2, SP2)),
    "experts": (SPARSE, (SP2, ParallelConfig(expert=2))),
    "dora of experts": (SPARSE_DORA, (TP2, ParallelConfig(expert=2))),
    "latent": (replace(MORE["deepseek_v3-direct"], lora=LORA), (SP2,)),
    "indexed": (replace(MORE["glm_moe_dsa"], lora=LORA), (SP2,)),
    "linear": (replace(MORE["qwen3_next"], lora=LORA), (SP2,)),
    "heads of two kinds": (replace(MORE["gemma4"], lora=LORA), (SP2,)),
    "keys of other layers": (replace(MORE["gemma4-inputs"], lora=LORA), (SP2,)),
    "experts beside an MLP": (replace(MORE["gemma4-experts"], lora=LORA), (SP2, ParallelConfig(expert=2))),
    "optional norms": (replace(MORE["glm4_moe"], lora=LORA), (SP2,)),
    "entries": (replace(MORE["deepseek_v4"], lora=LORA), (SP2,)),
    "mamba": (replace(MORE["nemotron_h"], lora=LORA), (SP2,)),
}


APART = BatchConfig(share_prompts=False)
FAST = replace(ADAM, lr=1e-2)


def whole(model: ShardedModel, table: list[ParamSpec], named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By canonical name. Collective over tensor and expert ranks."""
    parts: dict[str, list[torch.Tensor]] = {}
    for spec, t in gather_weights(table, named, model.layout):
        parts.setdefault(spec.canonical, []).append(t.clone())
    return {name: torch.cat(each) for name, each in parts.items()}


def factors(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Of this stage, whole. Collective over tensor and expert ranks."""
    named = {spec.canonical: param for spec, param in model.adapted.named()}
    return whole(model, adapter_table(model.cfg), named)


def own_factors(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Those that all tensor ranks have whole, as this one has them."""
    return {s.canonical: p.detach().clone() for s, p in model.adapted.named() if s.tp_axis is None}


def steps(model: ShardedModel, count: int, bc: BatchConfig = APART) -> list[dict]:
    full = batch(model.cfg)
    own, loss = shares(model, full), nll_loss(model, full)
    return [model.step(micro_batches(own, bc), loss) for _ in range(count)]


def train(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    count: int = 5,
    optim: OptimConfig = FAST,
    head: Head = Head(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    bc: BatchConfig = APART,
) -> dict:
    model = build(cfg, parallel, optim, head, dtype, packed=bc.packing, share=bc.share_prompts)
    metrics = steps(model, count, bc)
    buffers = model.wrapped.buffers + model.wrapped.expert_parallel_buffers
    return {
        "metrics": metrics,
        "factors": factors(model),
        "own": own_factors(model),
        "weights": weights(model),
        "logprobs": Policy(model, bc).logprobs(batch(cfg)) if head.kind == "lm" else None,
        "gradient_numbers": sum(b.grad_data.numel() for b in buffers),
        "trained": sum(p.numel() for p in model.module.parameters() if p.requires_grad),
    }


def gradients(cfg: ModelConfig) -> dict:
    """By Hugging Face's names: factors that are not their first, W beside them, the gradient of each factor, and that
    of the same numbers as whole weights of a model without adapters. Gradients: what one step of SGD subtracts."""
    model = build(cfg, ONE, SGD, packed=True, share=False)
    shake(model, 0.1)
    before, full = in_files(model), merged(model)
    steps(model, 1)
    plain = build(replace(cfg, lora=LoraConfig()), ONE, SGD, source=lambda spec: full[spec.canonical], share=False)
    whole = weights(plain)
    steps(plain, 1)
    return {
        "factors": before,
        "of_factors": {name: before[name] - t for name, t in in_files(model).items()},
        "base": weights(build(replace(cfg, lora=LoraConfig()))),
        "of_weights": {name: whole[name] - t for name, t in weights(plain).items()},
    }


def in_files(model: ShardedModel) -> dict[str, torch.Tensor]:
    """The factors of one rank by their names in files."""
    rows = {spec.canonical: spec for spec in adapter_table(model.cfg)}
    actual = (to_hf(rows[name], t, model.cfg) for name, t in factors(model).items())
    return {name: t for tensors in actual for name, t in tensors.items()}


def merged(model: ShardedModel) -> dict[str, torch.Tensor]:
    """By canonical names, in float32. Collective over tensor and expert ranks."""
    table = family_table(model.cfg, model.head.kind, model.head.outputs)
    return {name: t.float() for name, t in whole(model, table, model.weights()).items()}


@torch.no_grad()
def shake(model: ShardedModel, size: float) -> None:
    for spec, param in model.adapted.named():
        g = torch.Generator().manual_seed(len(spec.canonical) + sum(map(ord, spec.canonical)))
        param.add_(size * torch.randn(param.shape, generator=g))
    model.optimizer.reload_model_params()


def resumed(cfg: ModelConfig, folder: Path, parallel: ParallelConfig = ONE, other: ParallelConfig = ONE) -> dict:
    """Two steps, saved, and two more; and the latter again by a model of layout `other` that loads what was saved."""
    model = build(cfg, parallel, FAST, packed=True, share=False)
    steps(model, 2)
    save_model(model, folder)
    again = build(cfg, other, FAST, packed=True, share=False)
    load_model(again, folder)
    return {"straight": (steps(model, 2), factors(model)), "again": (steps(again, 2), factors(again))}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_five_steps_are_those_of_one_rank_on_every_layout(ranks, name):
    """The factors that all tensor ranks have whole stay the same to the bit: an error shows from the second step on."""
    cfg, layouts = LAYOUTS[name]
    (one,) = ranks.run(train, cfg=replace(cfg, recompute="none"))
    assert one["metrics"][-1]["loss"] < one["metrics"][0]["loss"] - 0.3
    assert one["metrics"][-1]["lora/b_norm"] > 0.1
    for parallel in layouts:
        results = ranks.run(train, world=2, cfg=cfg, parallel=parallel)
        for own in results:
            for key in ("loss", "grad_norm", "lora/b_norm"):
                got, wanted = (m["metrics"][-1][key] for m in (own, one))
                rel = 3e-3 if cfg.traits.hyper else 2e-4  # every layer makes vectors unit ones several times
                assert got == pytest.approx(wanted, rel=rel), (parallel, key)
        factors = {name: t for own in results for name, t in own["factors"].items()}
        worst = max((relative(factors[n], t), n) for n, t in one["factors"].items())
        assert worst[0] < 2e-3, (parallel, worst)  # Adam turns gradients of the size of rounding into steps
        if parallel.tensor > 1:
            assert results[0]["own"].keys() == results[1]["own"].keys() != set()
            assert all(torch.equal(t, results[1]["own"][n]) for n, t in results[0]["own"].items()), parallel


def test_gradients_and_optimizer_are_of_the_adapters_alone(ranks):
    (result,) = ranks.run(train, cfg=SOME, count=1)
    sizes = [torch.Size(spec.shape).numel() for spec in adapter_table(SOME)]
    numbers = sum(sizes)
    assert numbers <= result["gradient_numbers"] <= numbers + 64 * len(sizes)  # each begins at a multiple of 64
    (scores,) = ranks.run(train, cfg=SOME, count=1, head=Head("score", 2))
    assert scores["trained"] == numbers + 2 * SOME.hidden_size  # and the whole head


@pytest.mark.parametrize("cfg", [SOME, DORA, SPARSE, SPARSE_DORA, RSLORA])
@on_ranks(1)
def test_merged_weights_say_what_the_adapters_say(cfg):
    """Logprobs of trained adapters, and of a plain model with the merged weights."""
    model, rows = build(cfg, ONE, FAST), batch(cfg)
    steps(model, 3, BatchConfig())
    shake(model, 0.1)
    full = merged(model)
    plain = build(replace(cfg, lora=LoraConfig()), source=lambda spec: full[spec.canonical])
    adapted, wanted = (Policy(m, BatchConfig()).logprobs(rows) for m in (model, plain))
    torch.testing.assert_close(adapted, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "cfg",
    [SOME, RSLORA, DORA, SPARSE, SPARSE_DORA],
    ids=["lora", "rslora", "dora", "experts", "dora of experts"],
)
def test_gradients_are_those_of_the_whole_weights_by_the_chain_rule(ranks, cfg):
    """With y = W' x and W' = W + s B A, dA = s B^T dW' and dB = s dW' A^T. With DoRA W' = (m / |V|) V, |V| is held
    constant, so dm = sum dW' V / |V| along a row, and V's gradient is m / |V| times that of W'."""
    (result,) = ranks.run(gradients, cfg=cfg)
    factors = {n: t.double() for n, t in result["factors"].items()}
    scale = cfg.lora.alpha / (math.sqrt(cfg.lora.rank) if cfg.lora.rslora else cfg.lora.rank)
    modules = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    for module in modules:
        a, b = factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"]
        d = result["of_weights"][f"{module}.weight"].double()
        wanted = {}
        if cfg.lora.dora:
            v = result["base"][f"{module}.weight"].double() + scale * b @ a
            norm = v.norm(dim=1)
            wanted["lora_magnitude_vector"] = (d * v).sum(1) / norm
            d = d * (factors[f"{module}.lora_magnitude_vector"] / norm)[:, None]
        wanted |= {"lora_A.weight": scale * b.T @ d, "lora_B.weight": scale * d @ a.T}
        for name, gradient in wanted.items():
            assert relative(result["of_factors"][f"{module}.{name}"], gradient) < 2e-3, (module, name)
            assert gradient.norm() > 1e-4


@on_ranks(1)
def test_a_checkpoint_holds_adapters_alone_and_resumes_to_the_bit(tmp_path):
    actual = resumed(DORA, tmp_path)
    (metrics, wanted), (again, others) = actual["straight"], actual["again"]
    assert metrics == again and same(wanted, others)
    held = {key.removeprefix("optimizer.state.") for key in read_index(tmp_path).state_dict_metadata}
    names = {spec.canonical for spec in adapter_table(DORA)}
    assert {name for name in held if not name.startswith("common")} == {
        f"{prefix}{name}" for name in names for prefix in ("", "exp_avg.", "exp_avg_sq.")
    }


@pytest.mark.parametrize(
    "cfg, there, here", [(replace(SOME, num_layers=3), SP2, PP2), (SPARSE_DORA, ParallelConfig(expert=2), TP2)]
)
@on_ranks(2)
def test_another_layout_resumes_from_a_checkpoint(tmp_path, cfg, there, here):
    actual = resumed(cfg, tmp_path, there, here)
    (metrics, wanted), (again, others) = actual["straight"], actual["again"]
    assert again[-1]["loss"] == pytest.approx(metrics[-1]["loss"], rel=1e-5)
    both = wanted.keys() & others.keys()
    assert both and max(relative(others[name], wanted[name]) for name in both) < 2e-3


@pytest.mark.parametrize("cfg, parallel", [(SOME, TP2), (SOME, SP2), (replace(SPARSE, recompute="full"), TP2)])
def test_tensor_ranks_drop_alike_what_they_all_see(ranks, cfg, parallel):
    dropping = replace(cfg, lora=replace(cfg.lora, dropout=0.3))
    one, other = ranks.run(train, world=2, cfg=dropping, parallel=parallel, count=3)
    assert all(torch.equal(t, other["own"][name]) for name, t in one["own"].items())
    (plain,) = ranks.run(train, cfg=cfg, count=3)
    assert one["metrics"][-1]["loss"] != pytest.approx(plain["metrics"][-1]["loss"], rel=1e-3)
