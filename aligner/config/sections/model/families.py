"""What the config and the calculator must know of a model family; its parameters, and what config.json calls all this,
are in `models/families.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.scales import ScalesConfig
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.sections.model.config import ModelConfig


@dataclass(frozen=True)
class Traits:
    varies: tuple[str, ...] = ()  # keys of `model`, beside sizes, in which two models of the family may differ
    qkv_bias: bool = False  # where it does not vary
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads of a token, not over each
    tied: bool = False  # what a config.json without tie_word_embeddings means
    experts: bool = False
    fused: bool = False  # its files keep several matrices in one tensor
    norms: int = 2  # of a layer, over the hidden size
    latent: bool = False  # latent attention
    sigmoid_router: bool = False  # experts are chosen by sigmoids and a bias, in groups, not by a softmax
    output_bias: bool = False  # attention's output has a bias where queries, keys and values have one
    sinks: bool = False  # a learned score of each head joins the softmax, for which there is no value
    expert_bias: bool = False  # router and experts have biases
    gated_attention: bool = False  # attention's output is multiplied by the sigmoid of gates, made with the queries
    shared_gate: bool = False  # the output of the MLP for every token is multiplied by the sigmoid of a gate
    linear: bool = False  # layers without attention: `model.linear`
    own_layers: bool = False  # they differ from those that Megatron's own modules, and TransformerEngine's, can build


_BIASES = ("qkv_bias", "mlp_bias")
_WINDOW = ("attention.window",)
_LAYERS = (*_WINDOW, "attention.global_every", "attention.global_layers")
_LINEAR = tuple(f"linear.{f.name}" for f in fields(LinearConfig))
_GEMMA = (*_LAYERS, "attention.query_scale_dim", "qkv_bias")
_LATENT = tuple(f"latent.{f.name}" for f in fields(LatentConfig))
_GROUPED = tuple(f"moe.{name}" for name in ("dense_layers", "shared_ffn_hidden_size", "groups", "top_groups", "scale"))
TRAITS = {
    "llama": Traits(_BIASES, output_bias=True),
    "mistral": Traits(_WINDOW),
    "qwen2": Traits(_LAYERS, qkv_bias=True),
    "qwen3": Traits((*_LAYERS, "qkv_bias"), qk_norm=True, output_bias=True),
    "gemma2": Traits(
        (*_GEMMA, "attention.softcap", "scales.logits_softcap"), tied=True, norms=4, output_bias=True, own_layers=True
    ),
    "gemma3_text": Traits(
        (*_GEMMA, "attention.local_rope_base"), qk_norm=True, tied=True, norms=4, output_bias=True, own_layers=True
    ),
    "phi3": Traits((*_WINDOW, "attention.rotary_fraction"), fused=True),
    "glm": Traits(("qkv_bias", "attention.rotary_fraction"), fused=True, own_layers=True),
    "glm4": Traits(("qkv_bias", "attention.rotary_fraction"), fused=True, norms=4, own_layers=True),
    "granite": Traits(
        (*_BIASES, "attention.multiplier", "scales.embedding", "scales.residual", "scales.logits"), output_bias=True
    ),
    "smollm3": Traits((*_BIASES, *_LAYERS, "attention.nope_layers"), tied=True, output_bias=True),
    "olmo2": Traits(("qkv_bias",), qk_norm=True, wide_qk_norm=True, output_bias=True, own_layers=True),
    "olmo3": Traits(
        ("qkv_bias", *_LAYERS, "attention.local_rope_base"),
        qk_norm=True,
        wide_qk_norm=True,
        output_bias=True,
        own_layers=True,
    ),
    "qwen3_moe": Traits((*_WINDOW, "qkv_bias", "moe.dense_layers"), qk_norm=True, experts=True, output_bias=True),
    "mixtral": Traits(_WINDOW, experts=True),
    "gpt_oss": Traits(
        (*_LAYERS, "qkv_bias"),
        qkv_bias=True,
        experts=True,
        output_bias=True,
        fused=True,
        sinks=True,
        expert_bias=True,
    ),
    "deepseek_v3": Traits((*_LATENT, *_GROUPED), experts=True, latent=True, sigmoid_router=True, own_layers=True),
    "qwen3_next": Traits(
        (*_LINEAR, "attention.rotary_fraction", "moe.dense_layers", "moe.shared_ffn_hidden_size"),
        qk_norm=True,
        experts=True,
        gated_attention=True,
        shared_gate=True,
        linear=True,
        own_layers=True,
    ),
}
MOE_FAMILIES = tuple(name for name, traits in TRAITS.items() if traits.experts)


def check_traits(model: ModelConfig) -> None:
    """Raises ConfigError for a key that models of this family do not have."""
    varies = TRAITS[model.family].varies
    for key, value, plain in unusual(model):
        if key not in varies:
            having = ", ".join(name for name, traits in TRAITS.items() if key in traits.varies)
            raise ConfigError(f"model.{key}", value, f"{plain} with model.family={model.family}: {having} have it")
    window, layers = model.attention.window, set(_LAYERS) - set(_WINDOW)
    if "attention.local_rope_base" in varies and not window:
        raise ConfigError("model.attention.window", 0, f"at least 1 for model.family={model.family}")
    for key in sorted(layers):
        value = getattr(model.attention, key.removeprefix("attention."))
        if value and not window:
            raise ConfigError(f"model.{key}", value, "none without model.attention.window")


def unusual(model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(key, value, what it is in a plain model) of optional keys that are not plain."""
    found: list[tuple[str, Any, Any]] = [("mlp_bias", model.mlp_bias, False)]
    moe = {"dense_layers": [], "shared_ffn_hidden_size": 0, "groups": 1, "top_groups": 1, "scale": 1.0}
    found += [(f"moe.{name}", getattr(model.moe, name), plain) for name, plain in moe.items()]
    sections = {"attention": AttentionConfig(), "latent": LatentConfig(), "linear": LinearConfig()}
    for section, plain in (sections | {"scales": ScalesConfig()}).items():
        mine, theirs = asdict(getattr(model, section)), asdict(plain)
        found += [(f"{section}.{name}", mine[name], theirs[name]) for name in mine]
    return [(key, value, plain) for key, value, plain in found if value != plain]
