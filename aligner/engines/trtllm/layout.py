"""TensorRT-LLM's named parameters (classes LLaMAForCausalLM and QWenForCausalLM, one rank) from the family table.

Tensors arrive by their Hugging Face names; each fills rows of one parameter:
  attention.qkv     rows of q, then k, then v: Megatron's query groups are taken apart by `params.to_hf`
  mlp.fc, mlp.gate  gate_proj and up_proj: GatedMLP computes proj(silu(fc(x)) * gate(x)), so that its "gate" is the
                    factor without the activation
  lm_head           of a model with tied embeddings: the embedding, once more
The vocabulary is not padded: TensorRT-LLM pads it to a multiple of its ranks, here one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import family_table
from aligner.models.params import ParamSpec, to_hf

_LAYER = "transformer.layers.{layer}."
# canonical name -> TensorRT-LLM's names, one for each parameter made of its Hugging Face tensors
NAMES = {
    "embedding.word_embeddings.weight": ("transformer.vocab_embedding.weight",),
    "decoder.final_layernorm.weight": ("transformer.ln_f.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "input_layernorm.weight": (_LAYER + "input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (_LAYER + "attention.qkv.weight",),
    "self_attention.linear_qkv.bias": (_LAYER + "attention.qkv.bias",),
    "self_attention.q_layernorm.weight": (_LAYER + "attention.q_layernorm.weight",),
    "self_attention.k_layernorm.weight": (_LAYER + "attention.k_layernorm.weight",),
    "self_attention.linear_proj.weight": (_LAYER + "attention.dense.weight",),
    "pre_mlp_layernorm.weight": (_LAYER + "post_layernorm.weight",),
    "mlp.linear_fc1.weight": (_LAYER + "mlp.fc.weight", _LAYER + "mlp.gate.weight"),
    "mlp.linear_fc2.weight": (_LAYER + "mlp.proj.weight",),
}


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a parameter: one Hugging Face tensor."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True)
class EngineParameter:
    """One parameter of TensorRT-LLM."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def layout(cfg: ModelConfig) -> dict[str, EngineParameter]:
    """Return every parameter by TensorRT-LLM's name. Raises KeyError for a family with a row that has no name there."""
    parameters: dict[str, EngineParameter] = {}
    for spec in family_table(cfg):
        _, _, inner = spec.canonical.partition("decoder.layers.")
        layer, _, row = inner.partition(".")
        names = NAMES[row if inner else spec.canonical]
        sources = _grouped(spec, len(names))
        for name, own in zip(names, sources, strict=True):
            target = _target(name.format(layer=layer), spec, own, cfg)
            parameters[target.name] = target
    if cfg.tie_embeddings:
        table = parameters["transformer.vocab_embedding.weight"]
        parameters["lm_head.weight"] = EngineParameter("lm_head.weight", table.shape, table.parts)
    return parameters


def _grouped(spec: ParamSpec, parameters: int) -> list[tuple[str, ...]]:
    """Return the Hugging Face names of each parameter: all of one, or one of each."""
    return [spec.hf] if parameters == 1 else [(name,) for name in spec.hf]


def _target(name: str, spec: ParamSpec, sources: tuple[str, ...], cfg: ModelConfig) -> EngineParameter:
    shapes = {n: tuple(t.shape) for n, t in to_hf(spec, torch.empty(spec.shape, device="meta"), cfg).items()}
    parts, rows = [], 0
    for source in sources:
        parts.append(Part(source, rows, rows + shapes[source][0]))
        rows = parts[-1].stop
    return EngineParameter(name, (rows, *shapes[sources[0]][1:]), tuple(parts))
