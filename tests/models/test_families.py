"""The family tables against random transformers models."""

import json
import os
from dataclasses import replace

import pytest
import torch
import transformers

from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.errors import CheckpointError, ConfigError, LayoutError
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.families.table import family_table
from aligner.models.fused import joined, parts_of
from aligner.models.params import expected_hf_shapes, from_hf, merge_tp, split_tp, to_hf
from aligner.models.rope import inverse_frequencies
from aligner.models.safetensors_io import INDEX, open_hf, write_hf
from tests.tiny import MORE, choice_biases, hf_weights, layer_scalars

SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 101,
}
SCALED = RopeScalingConfig(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
FAMILIES = {
    "llama": ModelConfig(family="llama", **SMALL),
    "llama3": ModelConfig(family="llama", rope_base=5e5, rope_scaling=SCALED, max_position=512, **SMALL),
    "qwen2": ModelConfig(family="qwen2", qkv_bias=True, **SMALL),
    "qwen3": ModelConfig(family="qwen3", qk_norm=True, **SMALL),
    "qwen3_moe": ModelConfig(family="qwen3_moe", qk_norm=True, moe=MoeConfig(4, 3, 24, norm_topk_prob=False), **SMALL),
    "mistral": ModelConfig(family="mistral", attention=AttentionConfig(window=7), **SMALL),
    "gemma3": ModelConfig(
        family="gemma3_text",
        qk_norm=True,
        rope_base=1e6,
        attention=AttentionConfig(window=7, global_every=2, local_rope_base=100.0, query_scale_dim=5),
        **SMALL,
    ),
    "mixtral": ModelConfig(family="mixtral", moe=MoeConfig(3, 2, SMALL["ffn_hidden_size"]), **SMALL),
} | {
    name: replace(cfg, head_dim=cfg.kv_channels, num_kv_heads=1 if cfg.traits.entries else 4)
    for name, cfg in MORE.items()
}
v4 = FAMILIES["deepseek_v4"]
FAMILIES["deepseek_v4"] = replace(v4, latent=replace(v4.latent, output_groups=4))
for gemma, heads in {"gemma4": 4, "gemma4-experts": 4, "gemma4-inputs": 0}.items():
    own = replace(MORE[gemma].attention, global_kv_heads=heads)
    FAMILIES[gemma] = replace(FAMILIES[gemma], num_heads=8, num_kv_heads=8, attention=own)
CASES = [
    pytest.param(replace(c, tie_embeddings=t), id=f"{n}-tied{int(t)}")
    for n, c in FAMILIES.items()
    for t in (False, True)[: 1 + c.traits.ties]
]


def reference(cfg, head="lm", num_labels=1):
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    raw = hf_config(cfg, head=head, num_labels=num_labels, **ids)
    kind = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = kind.from_config(transformers.AutoConfig.for_model(**raw)).eval()
    with torch.no_grad():  # norms and biases start as constants, which would hide a mix-up
        for p in (*model.parameters(), *choice_biases(model), *layer_scalars(model)):
            p.normal_()
    return model, raw


@pytest.mark.parametrize("cfg", CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_import_split_merge_export_is_bit_identical(cfg, tp):
    model, _ = reference(cfg)
    weights = hf_weights(model)
    assert {n: tuple(t.shape) for n, t in weights.items()} == expected_hf_shapes(cfg)
    back = {}
    for spec in family_table(cfg):
        full = from_hf(spec, weights, cfg)
        shards = [split_tp(spec, full, tp, rank) for rank in range(tp)]
        assert len({s.shape for s in shards}) == 1
        back |= to_hf(spec, merge_tp(spec, shards), cfg)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor), name


def test_layouts_are_megatrons():
    """Against loops: query-group interleave, per-shard [gate; up], padded vocabulary."""
    cfg = replace(FAMILIES["qwen2"], tie_embeddings=False)
    weights = hf_weights(reference(cfg)[0])
    specs = {s.canonical: s for s in family_table(cfg)}
    q, k, v = (weights[f"model.layers.1.self_attn.{x}_proj.weight"].split(8) for x in "qkv")
    rows = [t for g in range(4) for t in (q[2 * g], q[2 * g + 1], k[g], v[g])]
    qkv = specs["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert torch.equal(from_hf(qkv, weights, cfg), torch.cat(rows))
    assert torch.equal(split_tp(qkv, torch.cat(rows), 2, 1), torch.cat(rows[8:]))
    gate, up = (weights[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    fc1 = specs["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(split_tp(fc1, from_hf(fc1, weights, cfg), 2, 1), torch.cat([gate[32:], up[32:]]))
    vocab = specs["embedding.word_embeddings.weight"]
    last = split_tp(vocab, weights["model.embed_tokens.weight"], 4, 3)
    assert last.shape == (26, 48) and not last[23:].any() and last[22].any()


def test_experts_are_stacked_by_number():
    cfg = FAMILIES["mixtral"]
    weights = hf_weights(reference(cfg)[0])
    specs = {s.canonical: s for s in family_table(cfg)}
    at = "model.layers.1.block_sparse_moe.experts."
    both, down = (specs[f"decoder.layers.1.mlp.experts.{name}"] for name in ("gate_up", "down"))
    assert both.experts and down.experts and not specs["decoder.layers.1.mlp.router.weight"].experts
    full = from_hf(both, weights, cfg)
    assert full.shape == (3, 2, 64, 48)
    for expert in range(3):
        gate, up, out = (weights[f"{at}{expert}.{w}.weight"] for w in ("w1", "w3", "w2"))
        assert torch.equal(full[expert, 0], gate) and torch.equal(full[expert, 1], up)
        assert torch.equal(from_hf(down, weights, cfg)[expert], out)
        assert torch.equal(split_tp(both, full, 2, 1)[expert], torch.stack([gate[32:], up[32:]]))
        assert torch.equal(split_tp(down, from_hf(down, weights, cfg), 2, 1)[expert], out[:, 32:])


def test_replicated_and_row_parallel_axes():
    axes = {s.canonical: s.tp_axis for s in family_table(replace(FAMILIES["qwen3"], tie_embeddings=False))}
    assert axes["decoder.layers.0.self_attention.linear_proj.weight"] == 1
    assert axes["decoder.layers.0.mlp.linear_fc2.weight"] == 1
    assert axes["output_layer.weight"] == 0
    assert axes["decoder.layers.0.self_attention.q_layernorm.weight"] is None


@pytest.mark.few(24)
@pytest.mark.parametrize("cfg", CASES)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_written_folder_loads_in_transformers(cfg, shard_bytes, tmp_path):
    model, raw = reference(cfg)
    folder = tmp_path / "hf"
    write_hf(
        folder,
        joined(hf_weights(model).items(), parts_of(cfg)),
        raw,
        shard_bytes,
        extra=lambda p: (p / "note").write_text("x"),
    )
    assert (folder / INDEX).exists() == (shard_bytes < 1 << 30) and (folder / "note").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model)
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    ids = torch.arange(200)[None] % 101  # beyond the original context, so that rope scaling shows
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    rope = getattr(model.model, "rotary_emb", None)  # which attention without positions lacks
    kinds = {"full_attention_": False, "sliding_attention_": True} if cfg.attention.local_rope_base else {"": False}
    if cfg.traits.entries:
        kinds = {"compress_": False, "main_": True}
    for name, local in kinds.items() if rope is not None else ():
        assert torch.allclose(getattr(rope, f"{name}inv_freq"), inverse_frequencies(cfg, local), rtol=1e-6)
    tensors = open_hf(folder)
    assert set(tensors) == set(hf_weights(model))
    last = next(spec.hf[0] for spec in cfg.traits.table if spec.canonical == "decoder.final_layernorm.weight")
    assert torch.equal(tensors[last], model.get_parameter(last))


@pytest.mark.parametrize("cfg", CASES)
def test_config_round_trip_through_transformers(cfg, tmp_path):
    model, raw = reference(cfg)
    model.config.save_pretrained(tmp_path)  # what transformers 5 writes: rope_parameters
    assert config_from_hf(tmp_path) == replace(cfg, init=str(tmp_path))
    if cfg.rope_scaling.type == "proportional":  # which transformers 4 does not know
        return
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}  # what transformers 4 wrote
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config_from_hf(tmp_path) == replace(cfg, init=str(tmp_path))


def test_score_head_loads_as_sequence_classification(tmp_path):
    cfg = FAMILIES["qwen2"]
    model, raw = reference(cfg, "score", 3)
    weights = model.state_dict()
    assert {n: tuple(t.shape) for n, t in weights.items()} == expected_hf_shapes(cfg, "score", 3)
    write_hf(tmp_path / "rm", weights.items(), raw)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert torch.equal(loaded.score.weight, model.score.weight)
    head = family_table(cfg, "score", 3)[-1]
    assert head.canonical == "output_layer.weight" and head.tp_axis is None


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "hf"
    write_hf(folder, [("a", torch.ones(2))], {})

    def broken():
        yield "a", torch.zeros(2)
        raise OSError("disk full")

    with pytest.raises(OSError):
        write_hf(folder, broken(), {})
    assert open_hf(folder)["a"].tolist() == [1, 1]
    write_hf(folder, [("a", torch.zeros(2))], {})
    assert open_hf(folder)["a"].tolist() == [0, 0] and [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_errors_name_the_culprit(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json"):
        config_from_hf(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        open_hf(tmp_path)
    for raw, text in (
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama"}, "hidden_size"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises((ConfigError, CheckpointError), match=text):
            config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json:1"):
        config_from_hf(tmp_path)
    cfg = FAMILIES["llama"]
    raw = hf_config(FAMILIES["qwen3_moe"], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "moe_intermediate_size"}))
    with pytest.raises(CheckpointError, match="moe_intermediate_size"):
        config_from_hf(tmp_path)
    with pytest.raises(ConfigError, match="qk_norm"):
        family_table(replace(cfg, qk_norm=True))
    embedding = family_table(cfg)[0]
    with pytest.raises(CheckpointError, match="embed_tokens"):
        from_hf(embedding, {}, cfg)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*100"):
        from_hf(embedding, lambda name: torch.zeros(100, 48), cfg)
    qkv = next(s for s in family_table(cfg) if s.transform == "qkv")
    with pytest.raises(LayoutError, match=r"parallel.tensor"):
        split_tp(qkv, torch.zeros(qkv.shape), 8, 0)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_weights_have_the_rights_of_other_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_hf(tmp_path / "hf", [("a", torch.ones(2)), ("b", torch.ones(2))], {}, max_shard_bytes=8)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {mode}
