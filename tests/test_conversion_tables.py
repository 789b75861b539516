"""Tables in the styles of both sources, true ones and ones with a fault."""

import pytest

from tests.conversion_tables import main

CALLS = """
from here import AutoMapping, Bridge, GatedMLPMapping, QKVMapping

def common(prefix="model."):
    names = {
        "embedding.word_embeddings.weight": f"{prefix}embed_tokens.weight",
        "decoder.final_layernorm.weight": f"{prefix}norm.weight",
        "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
        "model.layers.*.post_attention_layernorm.weight": "decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.*.self_attention.q_layernorm.weight": "model.layers.*.self_attn.q_norm.weight",
        "decoder.layers.*.self_attention.k_layernorm.weight": "model.layers.*.self_attn.k_norm.weight",
    }
    return [AutoMapping(a, b) for a, b in names.items()]

@Bridge.register(source="Qwen3ForCausalLM", model_type="qwen3")
class Qwen3Bridge(Bridge):
    def registry(self):
        down = "model.layers.*.mlp.down_proj.weight"
        return [
            *common(),
            AutoMapping(megatron_param="decoder.layers.*.mlp.linear_fc2.weight", hf_param=down),
            AutoMapping("decoder.layers.*.self_attention.linear_proj.weight", "model.layers.*.self_attn.o_proj.weight"),
            QKVMapping(
                megatron_param="decoder.layers.*.self_attention.linear_qkv.weight",
                q="model.layers.*.self_attn.q_proj.weight",
                k="model.layers.*.self_attn.k_proj.weight",
                v="model.layers.*.self_attn.v_proj.weight",
            ),
            GatedMLPMapping(
                megatron_param="decoder.layers.*.mlp.linear_fc1.weight",
                gate="model.layers.*.mlp.gate_proj.weight",
                up="model.layers.*.mlp.up_proj.weight",
            ),
        ]
"""
LISTS = """
class Common:
    ONES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight", "output_layer.weight": "lm_head.weight"}

@register_model("qwen3")
class Qwen3Bridge:
    ALL = {
        **Common.ONES,
        "self_attention.linear_proj.weight": ["model.layers.{layer_number}.self_attn.o_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        "self_attention.q_layernorm.weight": ["model.layers.{layer_number}.self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": ["model.layers.{layer_number}.self_attn.k_norm.weight"],
        "self_attention.linear_qkv.weight": ["model.layers.{layer_number}.self_attn.q_proj.weight",
            "model.layers.{layer_number}.self_attn.k_proj.weight",
            "model.layers.{layer_number}.self_attn.v_proj.weight"],
        "mlp.linear_fc1.weight": ["model.layers.{layer_number}.mlp.gate_proj.weight",
            "model.layers.{layer_number}.mlp.up_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": ["model.layers.{layer_number}.mlp.down_proj.weight"],
    }
"""


@pytest.mark.parametrize("source", [CALLS, LISTS])
@pytest.mark.parametrize(
    ("old", "new", "report"),
    [
        ("", "", "all of ours are there"),
        ("mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc1.weight: joined there as"),  # and the other way round
        ("self_attn.k_proj", "self_attn.v_proj", "self_attention.linear_qkv.weight: joined there as"),
        ("o_proj", "output_proj", "self_attn.o_proj.weight: not there"),
    ],
)
def test_a_fault_is_named(source, old, new, report, tmp_path, capsys):
    swapped = source.replace(old, "\0").replace(new, old).replace("\0", new) if old else source
    (tmp_path / "bridge.py").write_text(swapped)
    assert main([str(tmp_path)]) == bool(old)
    assert report in capsys.readouterr().out


def test_names_that_only_they_have_are_listed(tmp_path, capsys):
    extra = "model.layers.*.self_attn.gate_proj.weight"
    (tmp_path / "bridge.py").write_text(CALLS.replace("*common(),", f'*common(), AutoMapping("decoder.x", "{extra}"),'))
    assert main([str(tmp_path)]) == 0
    assert f"only there: {extra}" in capsys.readouterr().out


def test_a_folder_without_tables_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}: expected a checkout of Megatron-Bridge or mbridge" in capsys.readouterr().err
