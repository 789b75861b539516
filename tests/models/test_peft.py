"""Adapters through files: the real `peft` computes with them what the merged weights say, and they come back."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.models.adapters import LORA_A, LORA_B, MAGNITUDE
from aligner.models.fused import joined, parts_of
from aligner.models.peft import CONFIG, WEIGHTS, adapter_config, expected_adapter, read_adapter, write_adapter
from aligner.models.safetensors_io import write_hf
from tests.tiny import DEEPSEEK, GPT_OSS, MIXTRAL, MODELS, MOE, MORE, WINDOWS, hf_weights, transformers_model

LORA = LoraConfig(rank=3, alpha=7)
IN_PROJ = [f"in_proj_{name}" for name in ("z", "x", "B", "C", "dt")]
CASES = {
    "llama": (MODELS["llama"], LORA),
    "qwen2-rslora": (MODELS["qwen2"], replace(LORA, rslora=True)),
    "gemma3-dora": (WINDOWS["gemma3"], replace(LORA, dora=True)),
    "gemma3-rslora-dora": (WINDOWS["gemma3"], replace(LORA, rslora=True, dora=True)),
    "phi3": (MORE["phi3"], LORA),  # its files join q, k, v and gate, up
    "phi3-part": (MORE["phi3"], replace(LORA, targets=["k_proj", "down_proj"], rslora=True)),
    "glm-dora": (MORE["glm"], replace(LORA, dora=True)),
    "gemma4": (MORE["gemma4"], LORA),
    "nemotron_h": (MORE["nemotron_h"], replace(LORA, targets=["q_proj", "in_proj_x", "in_proj_dt"])),
    "nemotron_h-dora": (MORE["nemotron_h-dense"], replace(LORA, targets=[*IN_PROJ, "up_proj", "down_proj"], dora=True)),
    "qwen3_moe": (MOE, LORA),
    "qwen3_moe-rslora": (MOE, replace(LORA, rslora=True)),
    "mixtral-rslora": (MIXTRAL, replace(LORA, targets=["q_proj", "w1", "w2", "w3"], rslora=True)),
    "mixtral": (MIXTRAL, replace(LORA, targets=["q_proj", "w1", "w2", "w3"])),
}


def factors(cfg, weights, seed=5):
    """B is not zero; magnitudes are near the rows' norms."""
    g = torch.Generator().manual_seed(seed)
    results = {}
    for name, shape in expected_adapter(cfg).items():
        noise = torch.randn(shape, generator=g)
        if name.endswith(MAGNITUDE):
            noise = weights[name.replace(MAGNITUDE, "weight")].norm(dim=1) * (1 + 0.2 * noise)
        results[name] = noise * (1.0 if name.endswith(MAGNITUDE) else 0.3)
    return results


def merged(cfg, weights, tensors):
    """By the definition, in float64."""
    out = dict(weights)
    for name in weights:
        at = name.removesuffix("weight")
        if at + LORA_B not in tensors:
            continue
        a, b = tensors[at + LORA_A].double(), tensors[at + LORA_B].double()
        lora = cfg.lora
        weight = weights[name].double() + lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank) * b @ a
        if lora.dora:
            weight *= (tensors[at + MAGNITUDE].double() / weight.norm(dim=1))[:, None]
        out[name] = weight.float()
    return out


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", CASES)
def test_peft_loads_what_we_write(tmp_path, name):
    peft = pytest.importorskip("peft")
    cfg, lora = CASES[name]
    cfg = replace(cfg, lora=lora, tie_embeddings=False)
    model, raw = transformers_model(cfg)
    weights = hf_weights(model)
    tensors = factors(cfg, weights)
    write_adapter(tmp_path, cfg, tensors, adapter_config(cfg, "base"))

    tokens = torch.randint(1, cfg.vocab_size, (2, 11), generator=torch.Generator().manual_seed(2))
    write_hf(tmp_path / "whole", joined(merged(cfg, weights, tensors).items(), parts_of(cfg)), raw)
    wanted = logits(type(model).from_pretrained(tmp_path / "whole").eval(), tokens)
    before = logits(model, tokens)
    actual = logits(peft.PeftModel.from_pretrained(model, tmp_path), tokens)
    assert (wanted - before).abs().max() > 0.1
    assert (actual - wanted).abs().max() < 1e-5 * wanted.abs().max()

    again = read_adapter(tmp_path, cfg)
    assert again.keys() == tensors.keys() and all(torch.equal(again[n], tensors[n]) for n in tensors)


@pytest.fixture
def written(tmp_path):
    cfg = replace(MODELS["llama"], lora=LORA)
    shapes = expected_adapter(cfg)
    write_adapter(tmp_path, cfg, {n: torch.ones(s) for n, s in shapes.items()}, adapter_config(cfg, "base"))
    return cfg, tmp_path


def change(folder, **fields):
    raw = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(raw))


REFUSED = {
    "rank": ({"r": 4}, "model.lora.rank"),
    "alpha": ({"lora_alpha": 8}, "model.lora.alpha"),
    "rslora": ({"use_rslora": True}, "model.lora.rslora"),
    "dora": ({"use_dora": True}, "model.lora.dora"),
    "kind": ({"peft_type": "IA3"}, "LORA"),
    "another base than W": ({"init_lora_weights": "pissa_niter_4"}, "merge"),
    "biases": ({"bias": "lora_only"}, "plain LoRA"),
    "others trained": ({"modules_to_save": ["lm_head"]}, "plain LoRA"),
    "ranks by module": ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern\.q_proj=8: expected 3 for model\.layers\.0"),
    "alphas by module": ({"alpha_pattern": {"down_proj": 8}}, r"alpha_pattern\.down_proj=8: expected 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_kind_of_adapter_is_refused(written, name):
    cfg, folder = written
    fields, reported = REFUSED[name]
    read_adapter(folder, cfg)
    change(folder, **fields)
    with pytest.raises(CheckpointError, match=reported) as error:
        read_adapter(folder, cfg)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_what_peft_itself_writes_is_read(written):
    peft = pytest.importorskip("peft")
    cfg, folder = written
    model, _ = transformers_model(cfg)
    plain = {"r": 3, "lora_alpha": 7, "target_modules": LORA.targets, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**plain))
    model.save_pretrained(folder / "theirs")
    adapter = read_adapter(folder / "theirs", cfg)
    state = model.state_dict()
    for name, tensor in adapter.items():
        assert torch.equal(tensor, state["base_model.model." + name.replace(".weight", ".default.weight")])


def test_other_modules_layers_and_sizes_are_refused(written):
    cfg, folder = written
    fewer = replace(cfg, lora=replace(LORA, targets=["q_proj"]))
    with pytest.raises(
        ConfigError, match=r"model.lora.targets=\['q_proj'\].*also holds .*down_proj.lora_A.weight and 23"
    ):
        read_adapter(folder, fewer)
    with pytest.raises(ConfigError, match=r"lacks .*layers.2.*lora_A"):
        read_adapter(folder, replace(cfg, num_layers=3))
    with pytest.raises(
        CheckpointError, match=r"has shape \(48, 3\): expected \(64, 3\). The adapter is of another base"
    ):
        read_adapter(folder, replace(cfg, ffn_hidden_size=64))
    with pytest.raises(ConfigError, match=f"model.lora.init='.*': expected a folder with {CONFIG}"):
        read_adapter(folder / "nothing", cfg)


def test_names_that_peft_would_only_warn_of_are_refused(written):
    cfg, folder = written
    tensors = load_file(folder / WEIGHTS)
    save_file({name.removeprefix("base_model."): t for name, t in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"lacks base_model.*also holds model\.model"):
        read_adapter(folder, cfg)
    (folder / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_adapter(folder, cfg)


def test_one_rank_for_a_joined_matrix_or_blocks_of_its_parts(tmp_path):
    """As peft trains Phi-3: one A for queries, keys and values."""
    cfg = replace(MORE["phi3"], lora=replace(LORA, targets=["q_proj", "k_proj", "v_proj"]))
    g = torch.Generator().manual_seed(0)
    at = "base_model.model.model.layers.{}.self_attn.qkv_proj.lora_{}.weight"
    shapes = {"A": (3, 32), "B": (64, 3)}
    theirs = {at.format(i, x): torch.randn(shapes[x], generator=g) for i in range(2) for x in "AB"}
    save_file(theirs, tmp_path / WEIGHTS)
    config = adapter_config(cfg, "base") | {"rank_pattern": {}, "alpha_pattern": {}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    adapter = read_adapter(tmp_path, cfg)
    for i in range(2):
        parts = [adapter[f"model.layers.{i}.self_attn.{x}_proj.{LORA_B}"] for x in "qkv"]
        assert torch.equal(torch.cat(parts), theirs[at.format(i, "B")])
        for x in "qkv":
            assert torch.equal(adapter[f"model.layers.{i}.self_attn.{x}_proj.{LORA_A}"], theirs[at.format(i, "A")])
    with pytest.raises(CheckpointError, match="nothing else"):  # values would lose theirs
        read_adapter(tmp_path, replace(cfg, lora=replace(LORA, targets=["q_proj", "k_proj"])))


LOST = {
    "stacked experts": (GPT_OSS, LORA, "stack"),
    "shared experts": (DEEPSEEK, replace(LORA, targets=["gate_proj", "up_proj", "down_proj"]), "leave out"),
    "experts with dora": (MOE, replace(LORA, dora=True), "other modules"),
    "one of gate and up": (MOE, replace(LORA, targets=["gate_proj"]), "together"),
    "Mamba-2": (MORE["nemotron_h"], replace(LORA, targets=["out_proj"]), "no out_proj.*nemotron_h"),
    "a part with dora": (MORE["phi3"], replace(LORA, targets=["k_proj"], dora=True), "all parts of qkv_proj"),
}


@pytest.mark.parametrize("name", LOST)
def test_no_folder_that_peft_would_load_in_part(name):
    cfg, lora, reported = LOST[name]
    with pytest.raises(ConfigError, match=f"model.lora.targets.*{reported}"):
        adapter_config(replace(cfg, lora=lora), "base")
