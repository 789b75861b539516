"""What config.json says, against transformers' reading of it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import transformers

from aligner.config.sections.model.linear import LinearConfig
from aligner.errors import AlignerError, CheckpointError
from aligner.families import FAMILIES
from aligner.families.hf_config import config_from_hf, hf_config, is_known
from tests.tiny import MIXTRAL, MODELS, MOE, MORE, WINDOWS

CASES = {**MODELS, **WINDOWS, **MORE, "moe": MOE, "mixtral": MIXTRAL}
INPUTS = MORE["gemma4-inputs"].attention
KEPT = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
KEPT += ("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok")
KEPT += ("moe_intermediate_size", "norm_topk_prob", "n_routed_experts", "n_shared_experts")
KEPT += ("n_group", "topk_group", "first_k_dense_replace", "hidden_size_per_layer_input")
SCALES = {
    "attn_logit_softcapping": "attention.softcap",
    "final_logit_softcapping": "scales.logits_softcap",
    "attention_multiplier": "attention.multiplier",
    "embedding_multiplier": "scales.embedding",
    "residual_multiplier": "scales.residual",
    "logits_scaling": "scales.logits",
    "kv_lora_rank": "latent.kv_rank",
    "q_lora_rank": "latent.query_rank",
    "qk_nope_head_dim": "latent.plain_dim",
    "qk_rope_head_dim": "latent.rotary_dim",
    "v_head_dim": "latent.value_dim",
    "rope_interleave": "latent.neighbours",
    "routed_scaling_factor": "moe.scale",
}


def written(folder, cfg, **change):
    raw = hf_config(cfg, bos_token_id=1, eos_token_id=2, pad_token_id=0) | change
    (folder / "config.json").write_text(json.dumps(raw))
    return raw


@pytest.mark.parametrize("case", [case for case, cfg in CASES.items() if not (cfg.pattern or cfg.entries.tokens)])
def test_absent_keys_mean_what_they_mean_to_transformers(case, tmp_path):
    cfg = CASES[case]
    layers = 5 if cfg.linear.key_heads else 6 if cfg.traits.global_heads else cfg.num_layers
    raw = written(tmp_path, replace(cfg, num_layers=layers))
    kept = {key: raw[key] for key in KEPT if key in raw and key not in dict(cfg.traits.sizes)}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    ours, theirs = config_from_hf(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    sizes = ours.vocab_size, ours.hidden_size, ours.ffn_hidden_size, ours.num_layers, ours.num_heads, ours.num_kv_heads
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    assert sizes == tuple(getattr(theirs, key, size) for key, size in zip(keys.split(), sizes, strict=True))
    rope = theirs.rope_parameters
    assert ours.rope_base == rope.get("full_attention", rope)["rope_theta"]
    scaling, kind = ours.rope_scaling, rope.get("full_attention", rope).get("rope_type", "default")
    assert (scaling.type if scaling.scales else "default") == kind
    if kind == "yarn":
        inputs = {key: getattr(scaling, key) for key in rope if hasattr(scaling, key)}
        assert inputs == {key: rope[key] for key in inputs} and len(inputs) > 1
        assert scaling.original_max_position == rope["original_max_position_embeddings"]
    assert ours.norm_eps == theirs.rms_norm_eps and ours.init_std == theirs.initializer_range
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    layer = theirs.per_layer_config[0] if ours.traits.global_heads else theirs
    of_head = getattr(theirs, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    assert ours.kv_channels == (of_head or theirs.hidden_size // theirs.num_attention_heads)
    window = getattr(theirs, "sliding_window", None) if getattr(theirs, "use_sliding_window", True) else 0
    assert ours.attention.window == (window or 0)
    biased = getattr(theirs, "attention_bias", ours.family == "qwen2")
    assert ours.qkv_bias == biased and ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qk_norm == getattr(theirs, "use_qk_norm", ours.traits.qk_norm)
    assert ours.attention.nope_layers == [i for i, on in enumerate(getattr(theirs, "no_rope_layers", ())) if not on]
    for key, value in theirs.to_dict().items():
        if key in SCALES:
            section, _, name = SCALES[key].partition(".")
            assert getattr(getattr(ours, section), name) == (value or 0), key
    if ours.linear.key_heads:
        kinds = ["linear_attention" if ours.linear.is_linear(i) else "full_attention" for i in range(ours.num_layers)]
        assert kinds == theirs.layer_types and ours.attention.rotary_fraction == rope["partial_rotary_factor"]
        heads = theirs.linear_num_key_heads, theirs.linear_num_value_heads
        sizes = theirs.linear_key_head_dim, theirs.linear_value_head_dim, theirs.linear_conv_kernel_dim
        assert ours.linear == LinearConfig(*heads, *sizes, attention_every=4)
        assert ours.moe.shared_ffn_hidden_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    if "gemma" in case or case in ("olmo3", "gpt_oss"):
        kinds = [
            "sliding_attention" if ours.attention.is_local(i) else "full_attention" for i in range(ours.num_layers)
        ]
        assert kinds == theirs.layer_types
        local = rope.get("sliding_attention", {"rope_theta": 0})
        assert ours.attention.local_rope_base == local["rope_theta"]
        assert ours.attention.query_scale_dim == getattr(theirs, "query_pre_attn_scalar", 0)
    if ours.traits.global_heads:
        last, fraction = theirs.per_layer_config[ours.num_layers - 1], rope["full_attention"]["partial_rotary_factor"]
        heads = ours.of_kinds(ours.layer_kinds(ours.num_layers - 1))
        assert (heads.kv_channels, heads.num_kv_heads) == (last.head_dim, last.num_key_value_heads)
        assert ours.attention.rotary_fraction == fraction and ours.attention.own_values


def test_heads_of_global_layers_are_read_as_transformers_writes_them(tmp_path):
    cfg = replace(MORE["gemma4"], num_layers=12)
    raw = written(tmp_path, cfg)
    transformers.AutoConfig.for_model(**raw).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in theirs
    assert replace(config_from_hf(tmp_path), init="random") == cfg
    alone = json.loads(json.dumps(theirs)) | {"partial_rotary_factor": cfg.attention.rotary_fraction}
    del alone["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps(alone))
    assert config_from_hf(tmp_path).attention.rotary_fraction == cfg.attention.rotary_fraction
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"per_layer_config": {}}))
    heads = config_from_hf(tmp_path)
    assert (heads.attention.global_head_dim, heads.attention.global_kv_heads) == (cfg.head_dim, 0)
    theirs["per_layer_config"]["01"]["head_dim"] = 16
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(AlignerError, match=r"per_layer_config.*the same head_dim"):
        config_from_hf(tmp_path)


LAYERS = {"num_hidden_layers": 12, "mlp_layer_types": ["dense", *["sparse"] * 11]}


@pytest.mark.parametrize(
    "keys, shared",
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [3, 4, 5, 7, 8, 9, 11]),  # GLM-5.2's
        ({"index_topk_freq": 3}, [2, 3, 5, 6, 8, 9, 11]),
        ({"index_topk_pattern": "FFSFSSFFFFFS"}, [2, 4, 5, 11]),
        ({"index_topk_pattern": ["full", *["shared"] * 11]}, [*range(1, 12)]),
        ({"indexer_types": ["full"] * 11 + ["shared"], "index_topk_freq": 4}, [11]),
        ({}, []),
    ],
)
def test_shared_choices_are_those_of_transformers(keys, shared, tmp_path):
    raw = written(tmp_path, MORE["glm_moe_dsa"]) | LAYERS | keys
    for key in {"indexer_types", "index_topk_pattern"} - keys.keys():
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = config_from_hf(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.indexer.shared_layers == shared
    assert [kind == "shared" for kind in theirs.indexer_types] == [layer in shared for layer in range(12)]


def test_dense_layers_may_be_listed(tmp_path):
    raw = written(tmp_path, MORE["glm_moe_dsa"])
    del raw["first_k_dense_replace"]
    for kinds in (["dense", *["sparse"] * 3], ["dense"] * 3 + ["sparse"], ["sparse"] * 4):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"mlp_layer_types": kinds}))
        assert config_from_hf(tmp_path).moe.dense_layers == [n for n, kind in enumerate(kinds) if kind == "dense"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"indexer_types": ["shared", *["full"] * 3]}, "indexer_types.*the first full"),
        ({"indexer_types": ["full"] * 3}, "indexer_types.*each of 4 layers"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "indexer_types.*full or shared"),
        ({"indexer_types": None, "index_topk_pattern": "FXFF"}, "index_topk_pattern.*full or shared"),
        ({"mlp_layer_types": ["sparse", *["dense"] * 3]}, "mlp_layer_types.*dense for the first"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types.*dense for the first"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave=True .*It has False"),
        ({"q_lora_rank": None}, "model.latent.query_rank=0: expected at least 1"),
        ({"index_topk": 0}, "index_topk"),
    ],
)
def test_other_indexers_are_refused(change, words, tmp_path):
    written(tmp_path, MORE["glm_moe_dsa"], **change)
    with pytest.raises(AlignerError, match=words):
        config_from_hf(tmp_path)


def test_local_layers_of_gemma4_are_rotated_whole_by_every_reader(tmp_path):
    """The class in transformers gives what stands beside the kinds of layers to each of them, and vLLM then uses it."""
    theirs = transformers.AutoConfig.for_model(**written(tmp_path, MORE["gemma4"]))
    theirs.standardize_rope_params()
    assert "partial_rotary_factor" not in theirs.rope_parameters["sliding_attention"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size_per_layer_input": 6}, "vocab_size_per_layer_input=null: expected vocab_size=101"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input=-1: expected an integer"),
        ({"num_kv_shared_layers": 3}, "kv_shared_layers=3: expected at most 2, so that layers of each kind"),
        ({"num_kv_shared_layers": 20}, "kv_shared_layers=20: expected at most 2"),
        ({"enable_moe_block": True}, "no value for num_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='vision'.*It has 'all'"),
        ({"attention_bias": True}, "attention_bias=False"),
        ({"attention_k_eq_v": False}, "model.attention.global_kv_heads=2: expected 0"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer 3, the last, among the global"),
        ({"rope_parameters": {"rope_type": "default"}}, "model.rope_scaling.type='llama3': expected proportional"),
    ],
)
def test_other_models_of_gemma4_are_refused(change, words, tmp_path):
    written(tmp_path, MORE["gemma4"], **change)
    with pytest.raises(AlignerError, match=words):
        config_from_hf(tmp_path)
    raw = written(tmp_path, MORE["gemma4"])
    del raw["hidden_size_per_layer_input"]  # then it is 256
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(AlignerError, match=r"vocab_size_per_layer_input=null: expected vocab_size=101"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 262144}))
    assert config_from_hf(tmp_path).layer_input_size == 256


def test_layers_use_the_keys_of_the_last_layer_of_their_kind():
    """As in transformers, which names those that store keys and those that use them."""
    cfg = replace(MORE["gemma4-inputs"], num_layers=12, attention=replace(INPUTS, global_every=3, kv_shared_layers=5))
    raw = hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    theirs = transformers.AutoConfig.for_model(**raw)
    stored = {kind: n for n, kind in enumerate(theirs.layer_types) if theirs.kv_sharing_modes[n] == "store"}
    for layer, mode in enumerate(theirs.kv_sharing_modes):
        assert cfg.has_keys(layer) == (mode != "reuse")
        assert cfg.keys_of(layer) == (stored[theirs.layer_types[layer]] if mode == "reuse" else layer)
    assert stored == {"sliding_attention": 6, "full_attention": 5}


@pytest.mark.parametrize("case", ["nemotron_h", "nemotron_h-nano", "nemotron_h-dense"])
def test_absent_keys_of_layers_of_one_module_mean_what_they_mean_to_transformers(case, tmp_path):
    raw = written(tmp_path, CASES[case])
    kept = {key: raw[key] for key in (*KEPT, "hybrid_override_pattern") if key in raw}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    ours, theirs = config_from_hf(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.pattern == theirs.hybrid_override_pattern and ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.layer_norm_epsilon and ours.init_std == theirs.initializer_range
    assert ours.max_position == theirs.max_position_embeddings and ours.kv_channels == theirs.head_dim
    sizes = theirs.n_groups, theirs.mamba_num_heads, theirs.ssm_state_size, theirs.mamba_head_dim, theirs.conv_kernel
    assert ours.linear == LinearConfig(*sizes, rule="mamba2")
    if "E" in ours.pattern:
        assert ours.moe.shared_ffn_hidden_size == theirs.moe_shared_expert_intermediate_size
        assert (ours.moe.groups, ours.moe.top_groups) == (theirs.n_group, theirs.topk_group)
        assert ours.moe.scale == theirs.routed_scaling_factor
        assert ours.moe.latent_size == (theirs.moe_latent_size or 0)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"use_conv_bias": False}, "use_conv_bias=True"),
        ({"tie_word_embeddings": True}, "tie_embeddings=True"),
        ({"hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern='M-\\*X': expected one of M"),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "rnn"]}, "layers_block_type=.*moe"),
        ({"time_step_limit": [0.001, 1.0]}, "time_step_limit=.*without bounds"),
    ],
)
def test_other_layers_of_one_module_are_refused(change, words, tmp_path):
    written(tmp_path, MORE["nemotron_h"], **change)
    with pytest.raises(AlignerError, match=words):
        config_from_hf(tmp_path)


def test_steps_without_bounds_and_blocks_by_their_old_names_are_read(tmp_path):
    """As config.json of the hub, and as transformers 5 writes it."""
    cfg, kinds = MORE["nemotron_h"], ["mamba", "mlp", "attention", "moe"]
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        written(tmp_path, cfg, hybrid_override_pattern=None, layers_block_type=kinds, time_step_limit=limit)
        assert config_from_hf(tmp_path) == replace(cfg, head_dim=cfg.kv_channels, init=str(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read(case, tmp_path):
    written(tmp_path, CASES[case])
    cfg = CASES[case]
    assert config_from_hf(tmp_path) == replace(cfg, head_dim=cfg.kv_channels, init=str(tmp_path))


def test_another_name_of_a_family_is_read(tmp_path):
    """Kimi-K2's classes are DeepSeek-V3's; its YaRN begins and ends at the same number of turns."""
    rope = replace(MORE["deepseek_v3"].rope_scaling, beta_fast=1.0)
    cfg = replace(MORE["deepseek_v3"], rope_scaling=rope, head_dim=MORE["deepseek_v3"].kv_channels)
    written(tmp_path, cfg, model_type="kimi_k2")
    assert config_from_hf(tmp_path) == replace(cfg, init=str(tmp_path)) and is_known(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": "56"}, "hidden_size='56': expected an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected an integer from 1 to 10000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: expected"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a finite number > 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': expected true or false"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0: expected 10000.0, as another key of the file says"),
        ({"rope_parameters": []}, "rope_parameters=[]: expected a JSON object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}, "rope_parameters": None},
            "no value for rope_parameters.",
        ),
    ],
)
def test_a_wrong_value_is_reported(change, words, tmp_path):
    written(tmp_path, MODELS["llama"], **change)
    with pytest.raises(CheckpointError) as caught:
        config_from_hf(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and words in str(caught.value)


def test_config_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json: expected a JSON object, found \[\]"):
        config_from_hf(tmp_path)


def test_reading_config_json_imports_no_torch(tmp_path):
    """So `plan` reads what the trainer reads."""
    written(tmp_path, MORE["deepseek_v3"])
    code = f"import sys; from aligner.families.hf_config import config_from_hf; config_from_hf({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)


def test_every_family_has_a_case():
    assert {cfg.family for cfg in CASES.values() if cfg.family in FAMILIES} == set(FAMILIES)
