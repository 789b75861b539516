"""A base in 4 or 8 bits: training is that beside the same numbers in full precision, in less memory."""

from dataclasses import replace
from math import prod

import pytest
import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import LayoutError
from aligner.families.table import family_table
from aligner.megatron.offload import ModelMemory
from aligner.megatron.quantized_base import check_held
from aligner.models.adapters import adapter_table, held_sites
from aligner.ops.kernels.frozen import Frozen, held_bytes
from aligner.plan.adapters import held_parameters, saved_bytes
from aligner.plan.job import PlannedModel
from aligner.plan.shapes import Grid
from aligner.plan.sizes import weight_bytes
from aligner.roles.batching import micro_batches
from tests.megatron.models import ONE, build, nll_loss, shares, weights
from tests.tiny import ADAM, MODELS, MOE, MORE, batch, wild_source

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=2, quantize_base="nf4")
CASES = {
    "llama-nf4": (MODELS["llama"], LORA),
    "qwen3-int8-dora": (MODELS["qwen3"], replace(LORA, quantize_base="int8", dora=True)),
    "experts-fp8": (MOE, replace(LORA, quantize_base="fp8")),
    "deepseek_v3-nf4": (MORE["deepseek_v3"], replace(LORA, targets=["all-linear"])),
    "qwen3_next-nf4": (MORE["qwen3_next"], replace(LORA, targets=["q_proj"])),
    "nemotron_h-nf4": (MORE["nemotron_h"], replace(LORA, targets=["all-linear"])),
}
WIDE = replace(MODELS["llama"], hidden_size=128, ffn_hidden_size=128, num_heads=4, num_kv_heads=2, lora=LORA)


ROWS = BatchConfig(share_prompts=False)


def rounded(cfg: ModelConfig):
    """Weights in full precision that are what `cfg` holds of others."""
    wild, kind = wild_source(cfg), cfg.lora.quantize_base
    held = {site.base.canonical for site in held_sites(cfg)}

    def source(spec):
        full = wild(spec)
        return Frozen.of(full, kind).dense(torch.float32) if spec.canonical in held else full

    return source


def train(cfg: ModelConfig, parallel=ONE, plain: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    """Three steps; `plain`: beside weights in full precision that are the same numbers."""
    source = rounded(cfg) if plain else wild_source(cfg)
    used = replace(cfg, lora=replace(cfg.lora, quantize_base="none")) if plain else cfg
    model = build(used, parallel, ADAM, source=source, dtype=dtype)
    memory, full = ModelMemory(model), batch(cfg)
    own, loss = shares(model, full), nll_loss(model, full)
    metrics = [model.step(micro_batches(own, ROWS), loss) for _ in range(2)]
    memory.offload("weights")
    memory.restore("weights")
    metrics += [model.step(micro_batches(own, ROWS), loss)]
    return {"metrics": metrics, "weights": weights(model), "bytes": memory.held_bytes("weights")}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit_what_the_same_numbers_give(ranks, name):
    cfg, lora = CASES[name]
    cfg = replace(cfg, lora=lora)
    held, plain = (ranks.run(train, cfg=cfg, plain=p)[0] for p in (False, True))
    assert held["metrics"] == plain["metrics"]
    for tensor, wanted in zip(held["weights"].values(), plain["weights"].values(), strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_memory_of_weights(ranks, kind):
    """In bfloat16, by the table: what is held, the rest of the base, and the factors."""
    cfg = replace(WIDE, lora=replace(LORA, quantize_base=kind))
    results = ranks.run(train, cfg=cfg, dtype=torch.bfloat16)[0]["bytes"]
    held = {site.base.canonical: site.base.shape for site in held_sites(cfg)}
    rest = sum(prod(s.shape) for s in (*family_table(cfg), *adapter_table(cfg)) if s.canonical not in held)
    small = sum(held_bytes(prod(shape[:-1]), shape[-1], kind) for shape in held.values())
    assert results == small + 2 * rest
    planned = PlannedModel("policy", cfg, trained=True)
    assert results == weight_bytes(held_parameters(planned, Grid(), 0), 2) - saved_bytes(planned, Grid(), 0, 2)
    assert small / sum(2 * prod(shape) for shape in held.values()) == {"int8": 8.5 / 16, "nf4": 4.5 / 16}[kind]


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_hold_what_one_rank_does(ranks, sequence):
    one = ranks.run(train, cfg=WIDE)[0]
    two = ranks.run(train, 2, cfg=WIDE, parallel=ParallelConfig(tensor=2, sequence=sequence))
    for result in two:
        assert result["metrics"][-1]["loss"] == pytest.approx(one["metrics"][-1]["loss"], abs=2e-5)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(two[0]["weights"][embedding], one["weights"][embedding])
    with pytest.raises(
        LayoutError, match=r"parallel\.tensor=2: expected with model\.lora\.quantize_base .*multiples of 64"
    ):
        check_held(replace(WIDE, ffn_hidden_size=96), 2)
    check_held(WIDE, 2)
