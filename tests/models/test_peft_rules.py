"""adapter_config.json as `peft` itself writes it: an adapter is read as peft computes with it, or refused by name."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.models.fused import joined, parts_of
from aligner.models.peft import CONFIG, WEIGHTS, adapter_config, expected_adapter, read_adapter, write_adapter
from aligner.models.safetensors_io import write_hf
from tests.models.test_peft import logits, merged
from tests.tiny import MODELS, MOE, MORE, hf_weights, transformers_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = replace(MODELS["llama"], tie_embeddings=False)
QKV = ["q_proj", "k_proj", "v_proj"]
TOKENS = torch.randint(1, LLAMA.vocab_size, (2, 9), generator=torch.Generator().manual_seed(2))


def written(folder, cfg, **fields):
    """An adapter of peft's with random factors, saved; and the logits of it merged."""
    model, raw = transformers_model(cfg)
    weights = hf_weights(model)
    torch.manual_seed(0)
    fields = {"r": 4, "lora_alpha": 6, "target_modules": QKV, "task_type": "CAUSAL_LM"} | fields
    adapted = peft.get_peft_model(model, peft.LoraConfig(**fields))
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(tensor, std=0.3) if "magnitude" not in name else tensor.data.mul_(1.3)
    adapted.save_pretrained(folder)
    return weights, raw, logits(adapted.merge_and_unload().eval(), TOKENS)


def lora_of(folder, **fields):
    """What a user would set, by the files."""
    raw = json.loads((folder / CONFIG).read_text())
    targets = sorted({name.rsplit(".", 3)[1] for name in load_file(folder / WEIGHTS) if "lora_A" in name})
    known = {"rank": raw["r"], "alpha": raw["lora_alpha"], "rslora": raw["use_rslora"], "dora": raw["use_dora"]}
    return LoraConfig(**(known | {"targets": targets} | fields))


def ours(folder, cfg, weights, raw, **fields):
    cfg = replace(cfg, lora=lora_of(folder, **fields))
    tensors = read_adapter(folder, cfg)
    write_hf(folder / "whole", joined(merged(cfg, weights, tensors).items(), parts_of(cfg)), raw)
    model, _ = transformers_model(cfg)
    return logits(type(model).from_pretrained(folder / "whole").eval(), TOKENS)


EXACT = {
    "names": {},
    "full names": {"target_modules": [f"model.layers.{i}.self_attn.{x}" for i in range(2) for x in QKV]},
    "ends of names": {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
    "a pattern": {"target_modules": r".*\.self_attn\.[qk]_proj"},
    "a pattern of either": {"target_modules": r"model\.layers\.\d+\.(self_attn\.o_proj|mlp\.(up|gate)_proj)"},
    "all-linear": {"target_modules": "ALL-linear"},
    "some are excluded": {"target_modules": [*QKV, "up_proj"], "exclude_modules": ["self_attn.k_proj"]},
    "excluded by a pattern": {"target_modules": QKV, "exclude_modules": r".*\.v_proj"},
    "all layers": {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    "full names pass by layers": {
        "target_modules": [f"model.layers.{i}.self_attn.q_proj" for i in range(2)],
        "layers_to_transform": 0,
    },
    "a pattern of all ranks": {"r": 9, "rank_pattern": {r".*_proj": 4}},
    "the same by patterns": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"layers\.1\.self_attn\..*": 6}},
    "patterns of no module": {"alpha_pattern": {"proj": 64, "q": 64, "layers.0": 64, r"self_attn\.q_proj\.": 64}},
    "the first of two patterns": {"alpha_pattern": {r"[qkv]_proj": 6, r"self_attn.q_proj": 64}},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "rslora and dora": {"use_rslora": True, "use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "random": {"init_lora_weights": False},
    "dropout": {"lora_dropout": 0.3},
    "settings of an initialisation that was not used": {
        "corda_config": peft.tuners.lora.config.CordaConfig(),
        "eva_config": peft.EvaConfig(),
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_is_read_as_peft_computes_with_it(tmp_path, name):
    fields = EXACT[name]
    weights, raw, wanted = written(tmp_path, LLAMA, **fields)
    own = {"rank": 4} if "rank_pattern" in fields else {}
    assert (ours(tmp_path, LLAMA, weights, raw, **own) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_all_projections_of_a_family_that_joins_them(tmp_path):
    cfg = replace(MORE["phi3"], tie_embeddings=False)
    weights, raw, wanted = written(tmp_path, cfg, target_modules=r".*\.(qkv|down)_proj", use_rslora=True)
    actual = ours(tmp_path, cfg, weights, raw, targets=[*QKV, "down_proj"])
    assert (actual - wanted).abs().max() < 1e-5 * wanted.abs().max()


OTHERS = {
    "an alpha by a full name": ({"alpha_pattern": {"model.layers.0.self_attn.q_proj": 64}}, "alpha_pattern"),
    "an alpha by the end of a name": ({"alpha_pattern": {"layers.0.self_attn.q_proj": 64}}, "alpha_pattern"),
    "an alpha by a pattern": ({"alpha_pattern": {r"layers\.\d+\.self_attn\.(k|v)_proj": 64}}, "alpha_pattern"),
    "an alpha by a beginning": ({"alpha_pattern": {r"^model\.layers\.1\..*": 64}}, "alpha_pattern"),
    "the first pattern is another's": ({"alpha_pattern": {r".*q_proj": 64, "self_attn.q_proj": 6}}, "alpha_pattern"),
    "a rank by a pattern": ({"rank_pattern": {r"layers\.1\..*": 2}}, "rank_pattern"),
    "a rank and its alpha": ({"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"v_proj": 12}}, "rank_pattern"),
    "one layer": ({"layers_to_transform": 0}, "layers_to_transform"),
    "some layers": ({"layers_to_transform": [1], "layers_pattern": ["layers"]}, "layers_to_transform"),
    "one layer is excluded": ({"exclude_modules": r"model\.layers\.0\..*"}, "exclude_modules"),
    "a pattern of one layer": ({"target_modules": r"model\.layers\.1\..*q_proj"}, "model.lora.targets"),
    "biases": ({"bias": "lora_only"}, "bias"),
    "modules that are trained whole": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, "model.lora.targets"),
    "the output layer": ({"target_modules": ["q_proj", "lm_head"]}, "model.lora.targets"),
    "more layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "mica": ({"init_lora_weights": "mica"}, "init_lora_weights"),
    "invoked": ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens"),
    "kasa": ({"kasa_config": peft.tuners.lora.config.KasaConfig()}, "kasa_config"),
    "velora": ({"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=8)}, "velora_config"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_model_lora_cannot_say_is_refused_by_name(tmp_path, name):
    fields, key = OTHERS[name]
    try:
        written(tmp_path, LLAMA, **fields)
    except NotImplementedError as error:  # it has no merge, and is saved all the same
        assert "merging" in str(error)
    with pytest.raises(AlignerError, match=re.escape(key)) as error:
        read_adapter(tmp_path, replace(LLAMA, lora=lora_of(tmp_path)))
    assert "\n" not in str(error.value)


DAMAGED = {
    "target_modules": [None, [], "", "(", "q_proj", ["q_proj", 3], 7, ["k_proj"], [*QKV, "o_proj"], r".*q_proj"],
    "exclude_modules": ["[", "*", [3], 1, True, ["q_proj"], ".*k_proj"],
    "layers_to_transform": [0, [0], "0", True, [0, True], [1.0], {}, 7],
    "layers_pattern": ["layers", ["layers"]],  # nothing to be applied to
    "rank_pattern": [[], "q_proj", {"q_proj": "4"}, {"(": 4}, {"q_proj": None}, {"q_proj": 4.5}, {"(?i)q_proj": 4}],
    "alpha_pattern": [[], {"q_proj": True}, {"[": 6}, {"q_proj": 0}, {".*": 12}, {"^model.*": 6.5}],
    "kasa_config": [{}, {"beta": 0.1}],
    "monteclora_config": [{}],
    "use_bdlora": [{}, {"nblocks": 2}],
    "arrow_config": [{}],
    "velora_config": [{}],
    "alora_invocation_tokens": [[]],
    "trainable_token_indices": [[0]],
    "lora_bias": [True],
    "fan_in_fan_out": [True],
    "use_qalora": [True],
    "megatron_config": [{"hidden_size": 8}],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "ensure_weight_tying": [True],
    "init_lora_weights": ["pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", "new", 3, [], {}],
    "a_key_of_later_versions": [True, 1, {}, [], "x"],
}


@pytest.mark.parametrize("key", DAMAGED)
def test_damaged_or_foreign_values_name_their_key(tmp_path, key):
    written(tmp_path, LLAMA)
    raw, cfg = json.loads((tmp_path / CONFIG).read_text()), replace(LLAMA, lora=lora_of(tmp_path))
    read_adapter(tmp_path, cfg)
    for value in DAMAGED[key]:
        (tmp_path / CONFIG).write_text(json.dumps(raw | {key: value}))
        with pytest.raises(CheckpointError, match=key) as error:
            read_adapter(tmp_path, cfg)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value), value


def test_layers_and_a_pattern_of_modules_are_refused_together(tmp_path):
    """As peft refuses them."""
    written(tmp_path, LLAMA, target_modules=r".*q_proj")
    raw, cfg = json.loads((tmp_path / CONFIG).read_text()), replace(LLAMA, lora=lora_of(tmp_path))
    (tmp_path / CONFIG).write_text(json.dumps(raw | {"layers_to_transform": [0, 1]}))
    with pytest.raises(ValueError, match="layers_to_transform"):
        peft.PeftConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="layers_to_transform"):
        read_adapter(tmp_path, cfg)


NAMES = st.sampled_from(
    [
        "q_proj",
        "self_attn.k_proj",
        "up_proj",
        "layers.0.mlp.down_proj",
        "model.layers.1.self_attn.v_proj",
        "0.mlp.up_proj",
    ]
)
PATTERNS = st.sampled_from(
    [
        "q_proj",
        r".*",
        r".*q_proj",
        r"layers\.0\..*",
        r"^model\.layers\.1\.mlp\..*",
        r"(k|v)_proj",
        r"self_attn\..*",
        "proj",
    ]
)
CONFIGS = st.fixed_dictionaries(
    {"r": st.sampled_from([2, 4])},
    optional={
        "lora_alpha": st.sampled_from([6, 8]),
        "target_modules": st.lists(NAMES, min_size=1, max_size=4, unique=True)
        | st.sampled_from([r".*_proj", r".*\.(q|up)_proj", r"model\.layers\.\d\.mlp\..*_proj", "all-linear"]),
        "exclude_modules": st.lists(NAMES, max_size=2) | st.sampled_from([r".*mlp.*", r".*\.0\..*", r"q_proj"]),
        "rank_pattern": st.dictionaries(PATTERNS, st.sampled_from([2, 4]), max_size=2),
        "alpha_pattern": st.dictionaries(PATTERNS, st.sampled_from([6, 8]), max_size=2),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "layers_to_transform": st.sampled_from([0, [0, 1], [1], []]),
    },
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fields=CONFIGS)
def test_any_config_is_exact_or_refused(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("adapter")
    try:
        weights, raw, wanted = written(folder, LLAMA, **fields)
    except ValueError:  # peft's own: no module, or keys that do not go together
        return
    try:
        actual = ours(folder, LLAMA, weights, raw)
    except (ConfigError, CheckpointError) as error:
        assert any(key in str(error) for key in (*fields, "model.lora.targets")), error
        return
    assert (actual - wanted).abs().max() < 1e-5 * wanted.abs().max()


EXPERTS = ["q_proj", "gate_proj", "up_proj", "down_proj"]
OF_EXPERTS = {  # model.layers.0.mlp.experts.3.up_proj, and model.layers.0.mlp.experts.gate_up_proj for all of them
    "one expert's": ("alpha", r"experts\.3\.up_proj", 64),
    "one matrix of all experts": ("alpha", "down_proj", 64),
    "all experts at once": ("alpha", "experts.gate_up_proj", 64),
    "the rank of all at once": ("rank", "experts.gate_up_proj", 3),
    "everything below": ("alpha", r"layers\.1\..*", 7),  # twice that at the tensor that joins gate and up
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_patterns_of_experts_are_looked_up_by_both_of_their_names(tmp_path, name):
    kind, pattern, value = OF_EXPERTS[name]
    cfg = replace(MOE, lora=LoraConfig(rank=3, alpha=7, targets=EXPERTS))
    factors = {n: torch.ones(shape) for n, shape in expected_adapter(cfg).items()}
    config = adapter_config(cfg, "base")
    write_adapter(tmp_path, cfg, factors, config | {"alpha_pattern": {"experts.gate_up_proj": 14, "down_proj": 7}})
    read_adapter(tmp_path, cfg)
    write_adapter(tmp_path, cfg, factors, config | {f"{kind}_pattern": {pattern: value}})
    with pytest.raises(CheckpointError, match=re.escape(f"{kind}_pattern.{pattern}={value}: expected")):
        read_adapter(tmp_path, cfg)


def test_experts_that_peft_stacks_are_refused_by_name(tmp_path):
    """As the installed peft trains them beside transformers 5."""
    cfg = replace(MOE, tie_embeddings=False, lora=LoraConfig(rank=4, alpha=6, targets=EXPERTS))
    written(tmp_path, cfg, target_modules=EXPERTS)
    with pytest.raises(CheckpointError, match="target_parameters"):
        read_adapter(tmp_path, cfg)
