"""Which matrices have adapters, in every family of the table."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.errors import ConfigError
from aligner.families.table import family_table
from aligner.models.adapters import adapter_table, described, sites, target_names
from aligner.models.params import merge_tp, split_tp, to_hf
from tests.tiny import LLAMA, MIXTRAL, MODELS, MOE, MORE, WINDOWS

ALL = MODELS | WINDOWS | MORE | {"qwen3_moe": MOE, "mixtral": MIXTRAL}


def adapted(cfg, **lora):
    return replace(cfg, lora=LoraConfig(**{"rank": 2, "targets": [ALL_LINEAR], **lora}))


@pytest.mark.parametrize("name", ALL)
def test_every_matrix_of_the_layers_has_factors_of_its_shape_and_nothing_else_has(name):
    cfg = adapted(ALL[name])
    shapes = {n: t.shape for s in family_table(cfg) for n, t in to_hf(s, torch.empty(s.shape), cfg).items()}
    factors = {n: t.shape for s in adapter_table(cfg) for n, t in to_hf(s, torch.empty(s.shape), cfg).items()}
    results = set()
    for module in [n.removesuffix(".lora_A.weight") for n in factors if n.endswith("lora_A.weight")]:
        out, inner = shapes[f"{module}.weight"]
        assert factors.pop(f"{module}.lora_A.weight") == (2, inner)
        assert factors.pop(f"{module}.lora_B.weight") == (out, 2)
        results.add(f"{module}.weight")
    assert not factors
    left = {n.rsplit(".", 2)[-2] for n, shape in shapes.items() if len(shape) == 2 and n not in results}
    left -= {"wq_b", "wk", "weights_proj"}  # of indexers
    left -= {"embed_tokens_per_layer", "per_layer_model_projection"}  # of all layers
    if cfg.traits.entries:  # those of the same names in their indexers, a group's, and what is no matrix
        left -= {"wkv", "wgate", "wo_a", "compressor", "0", "1", "2", "3", "hc_head"}
    assert left <= {"embed_tokens", "embeddings", "lm_head", "gate", "router", "proj", "shared_expert_gate"}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h"])
def test_tensor_ranks_have_the_factors_of_their_rows_and_columns(name):
    cfg = adapted(ALL[name])
    for site in sites(cfg):
        base = torch.arange(float(torch.Size(site.base.shape).numel())).view(site.base.shape)
        whole = to_hf(site.base, base, cfg)
        for target in site.targets:
            for spec in (target.a, target.b):
                full = torch.rand(spec.shape)
                shards = [split_tp(spec, full, 2, rank) for rank in (0, 1)]
                assert torch.equal(merge_tp(spec, shards), full)
                assert (shards[0].shape != full.shape) == (spec.tp_axis is not None)
            assert all(f"{module}.weight" in whole for module in target.modules)
        groups, sizes = site.rows(cfg, 2)
        shard = split_tp(site.base, base, 2, 0)
        rows = shard[0].flatten(0, -2) if site.base.experts else shard
        assert groups * sum(sizes) == len(rows)


@pytest.mark.parametrize(
    "cfg, targets, message",
    [
        (LLAMA, ["q_proj", "c_attn"], "called c_attn"),
        (MOE, ["q_proj", "gate"], "called gate"),  # the router
        (MIXTRAL, ["q_proj", "gate_proj"], "w1, w3, w2"),
        (MORE["deepseek_v3"], ["k_proj"], "kv_b_proj"),
        (MORE["glm_moe_dsa"], ["q_b_proj", "wq_b"], "called wq_b"),  # no gradient reaches an indexer
        (LLAMA, ["lm_head"], "it is the embedding"),
        (replace(LLAMA, tie_embeddings=False), ["lm_head"], "never adapted."),
    ],
)
def test_a_target_that_no_matrix_of_the_layers_has_is_refused(cfg, targets, message):
    with pytest.raises(ConfigError, match=r"model\.lora\.targets") as error:
        adapter_table(adapted(cfg, targets=targets))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_each_expert_has_the_magnitudes_of_its_rows():
    cfg = adapted(MOE, dora=True, targets=["q_proj", "up_proj", "down_proj"])
    assert target_names(cfg) == ["q_proj", "up_proj", "down_proj"]
    by_name = {spec.canonical.rsplit(".", 2)[1]: spec for spec in adapter_table(cfg) if spec.float32}
    assert {name: (spec.shape, spec.tp_axis) for name, spec in by_name.items()} == {
        "q_proj": ((64,), 0),
        "up_proj": ((4, 24), 1),
        "down_proj": ((4, 32), None),
    }


@pytest.mark.parametrize("rank, plain, by_root", [(1, 6.0, 6.0), (4, 1.5, 3.0), (16, 0.375, 1.5), (64, 0.09375, 0.75)])
def test_the_scale_is_alpha_by_rank_or_by_its_root(rank, plain, by_root):
    assert LoraConfig(rank=rank, alpha=6.0).scale == plain
    assert LoraConfig(rank=rank, alpha=6.0, rslora=True).scale == by_root


def test_a_run_says_how_much_it_trains():
    cfg = adapted(LLAMA, targets=["o_proj"])  # 2 layers of 2 * (32 + 32) numbers
    assert "scale 16, on o_proj: 256 parameters" in described(cfg, "lm", 1)
    assert "on o_proj: 320 parameters" in described(cfg, "score", 2)
    assert adapter_table(LLAMA) == []


@pytest.mark.parametrize(
    "key, values",
    [
        ("rank", {"rank": -1}),
        ("alpha", {"alpha": 0.0}),
        ("dropout", {"dropout": 1.0}),
        ("targets", {"targets": []}),
        ("targets", {"targets": ["q_proj", "q_proj"]}),
        ("targets", {"targets": [ALL_LINEAR, "q_proj"]}),
    ],
)
def test_values_that_mean_nothing_are_refused(key, values):
    with pytest.raises(ConfigError, match=rf"model\.lora\.{key}"):
        LoraConfig(**values)
