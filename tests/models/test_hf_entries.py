"""What config.json says of layers with entries, against transformers' reading of it."""

import json

import pytest
import transformers

from aligner.errors import AlignerError
from aligner.families.hf_config import config_from_hf, hf_config
from tests.tiny import MORE

CFG = MORE["deepseek_v4"]
# of published files: numbers in place of names, one rotation with two bases, layers that predict ahead at the end
PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 101,
    "hidden_size": 32,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "qk_rope_head_dim": 32,
}


def read(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return config_from_hf(folder), transformers.AutoConfig.from_pretrained(folder)


def alike(ours, theirs) -> None:
    names = {(): "sliding", ("entries", "indexer"): "compressed_sparse", ("entries", "heavy"): "heavily_compressed"}
    kinds = [f"{names[ours.entries_of(layer)]}_attention" for layer in range(ours.num_layers)]
    assert kinds == theirs.layer_types
    assert [ours.entries.tokens, ours.entries.heavy_tokens] == list(theirs.compress_rates.values())
    assert ours.moe.hash_layers == theirs.mlp_layer_types.count("hash_moe")
    main, far = (theirs.rope_parameters[name] for name in ("main", "compress"))
    assert (ours.attention.local_rope_base, ours.rope_base) == (main["rope_theta"], far["rope_theta"])
    assert ours.attention.rotary_fraction == far["partial_rotary_factor"] == main["partial_rotary_factor"]
    assert (ours.rope_scaling.type if ours.rope_scaling.scales else "default") == far["rope_type"]
    assert ours.rope_scaling.attention_factor == far.get("attention_factor", 0)
    hyper = ours.hyper.streams, ours.hyper.iterations, ours.hyper.eps
    assert hyper == (theirs.hc_mult, theirs.hc_sinkhorn_iters, theirs.hc_eps)
    latent = ours.latent.query_rank, ours.latent.output_groups, ours.latent.output_rank
    assert latent == (theirs.q_lora_rank, theirs.o_groups, theirs.o_lora_rank)
    assert (ours.moe.scale, ours.moe.gate_limit) == (theirs.routed_scaling_factor, theirs.swiglu_limit)
    index = ours.indexer.heads, ours.indexer.head_dim, ours.indexer.top_k
    assert index == (theirs.index_n_heads, theirs.index_head_dim, theirs.index_topk)
    assert (ours.kv_channels, ours.attention.window) == (theirs.head_dim, theirs.sliding_window)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": None},
        {"compress_ratios": None, "num_hash_layers": None, "qk_rope_head_dim": None},
        {"compress_rate_csa": 8, "rope_theta": 500, "compress_rope_theta": 300.0, "head_dim": 64},
    ],
)
def test_published_and_absent_keys_mean_what_they_mean_to_transformers(change, tmp_path):
    raw = {key: value for key, value in (PUBLISHED | change).items() if value is not None}
    ours, theirs = read(tmp_path, raw)
    alike(ours, theirs)
    assert ours.max_position == theirs.max_position_embeddings and not ours.tie_embeddings


def test_what_is_written_is_read_by_both(tmp_path):
    raw = hf_config(CFG, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    alike(*read(tmp_path, raw))
    own = {"mscale": 0.5, "mscale_all_dim": 0.7}  # a factor that transformers computes
    raw["rope_parameters"]["compress"] = {**raw["rope_parameters"]["compress"], **own}
    del raw["rope_parameters"]["compress"]["attention_factor"], raw["rope_scaling"]
    alike(*read(tmp_path, raw))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"compress_ratios": [0, 0, 4, 2, 4]}, "compress_ratios=.*expected sliding_attention.*each of 5 layers"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types=.*expected sliding_attention"),
        (
            {"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 3]},
            "mlp_layer_types=.*hash_moe for the first of 5 layers",
        ),
        ({"scoring_func": "sigmoid"}, "scoring_func='sqrtsoftplus'.*It has 'sigmoid'"),
        ({"n_shared_experts": 2}, "n_shared_experts=1.*It has 2"),
        ({"hidden_act": "gelu"}, "hidden_act='silu'.*It has 'gelu'"),
        (
            {"expert_dtype": "int4", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "expected .*expert_dtype fp8 or fp4.*expert_dtype='int4'",
        ),
    ],
)
def test_other_models_are_refused(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(AlignerError, match=words):
        config_from_hf(tmp_path)
