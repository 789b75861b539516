"""The layout of TensorRT-LLM's parameters, against an independent forward from them and against a fresh loop."""

import json
from dataclasses import replace

import pytest
import torch

from aligner.engines.trtllm.layout import layout
from aligner.families.hf_config import hf_config
from aligner.families.table import family_table
from aligner.models.params import expected_hf_shapes
from tests.engines.contract import MODELS, reference
from tests.engines.trtllm.oracle import forward
from tests.tiny import hf_weights

SERVED = ("llama", "llama3", "qwen2", "qwen3", "mistral")


def placed(cfg, tensors: dict) -> dict:
    """Each parameter of the layout, filled part by part; every entry once."""
    out = {}
    for target in layout(cfg).values():
        out[target.name] = torch.full(target.shape, float("nan"), dtype=torch.float64)
        for piece in target.parts:
            assert out[target.name][piece.start : piece.stop].isnan().all()
            out[target.name][piece.start : piece.stop] = tensors[piece.source]
        assert not out[target.name].isnan().any()
    return out


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("tied", [False, True])
def test_an_independent_forward_of_the_named_parameters_equals_transformers(name, tied):
    """From Megatron's canonical tensors, by their Hugging Face names, to TensorRT-LLM's."""
    cfg = replace(MODELS[name], tie_embeddings=tied, attention=MODELS["llama"].attention)
    raw = json.loads(json.dumps(hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=None)))
    model = reference(cfg).double()
    weights = placed(cfg, hf_weights(model))
    tokens = torch.randint(0, cfg.vocab_size, (3, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = model(tokens).logits
    actual = forward(weights, raw, tokens)
    assert actual.dtype is torch.float64
    # transformers keeps rotary tables and norms in float32
    assert (actual - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert wanted.abs().max() > 1


@pytest.mark.parametrize("name", SERVED)
def test_every_tensor_of_the_family_table_has_a_place(name):
    cfg = MODELS[name]
    sources = {hf for spec in family_table(cfg) for hf in spec.hf}
    targets = layout(cfg).values()
    assert {piece.source for target in targets for piece in target.parts} == sources
    numbers = {name: torch.Size(shape).numel() for name, shape in expected_hf_shapes(cfg).items()}
    held = sum(torch.Size(t.shape).numel() for t in targets)
    assert held == sum(numbers.values()) + cfg.tie_embeddings * numbers["model.embed_tokens.weight"]


def test_the_halves_of_the_mlp_by_name():
    """GatedMLP applies the activation to fc: named the other way round, the forward would still run."""
    targets = layout(MODELS["llama"])
    at = "transformer.layers.1.mlp."
    assert [p.source for p in targets[at + "fc.weight"].parts] == ["model.layers.1.mlp.gate_proj.weight"]
    assert [p.source for p in targets[at + "gate.weight"].parts] == ["model.layers.1.mlp.up_proj.weight"]
    qkv = targets["transformer.layers.1.attention.qkv.weight"]
    assert [(p.source.split(".")[-2], p.start, p.stop) for p in qkv.parts] == [
        ("q_proj", 0, 32),
        ("k_proj", 32, 48),
        ("v_proj", 48, 64),
    ]


def test_families_with_other_rows_have_no_layout():
    for name in ("qwen3_moe", "mixtral", "gemma3"):
        with pytest.raises(KeyError):
            layout(MODELS[name])
