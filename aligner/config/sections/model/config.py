"""The section `model`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from aligner.config.checks import above, at_least, one_of
from aligner.config.sections.model.attention import AttentionConfig, check_layers
from aligner.config.sections.model.kernels import KERNELS
from aligner.config.sections.model.latent import LatentConfig, check_latent
from aligner.config.sections.model.linear import LinearConfig, check_linear
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.model.moe import MoeConfig, check_dense_layers, check_moe_family
from aligner.config.sections.model.rope import RopeScalingConfig, check_rope
from aligner.config.sections.model.scales import ScalesConfig
from aligner.errors import ConfigError
from aligner.families import FAMILIES
from aligner.families.family import LAYERS, Family

# what a run decides, whatever folder the weights come from
OF_THE_RUN = ("dtype", "recompute", "kernels", "varlen_attention", "tokenizer", "init", "lora")
MOE_OF_THE_RUN = ("aux_coef", "aux_over")


@dataclass
class ModelConfig:
    family: str = "llama"  # `model_type` of config.json (docs/models.md)
    num_layers: int = 4  # decoder layers
    hidden_size: int = 128  # width of the residual stream
    ffn_hidden_size: int = 384  # of the gated MLP
    num_heads: int = 4  # query heads
    num_kv_heads: int = 4  # heads of keys and values; a divisor of num_heads
    head_dim: int = 0  # 0: hidden_size / num_heads
    vocab_size: int = 0  # 0: the tokenizer's
    rope_base: float = 10000.0  # of the rotary frequencies
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = 1e-6  # of RMSNorm
    max_position: int = 4096  # the longest row, in tokens
    tie_embeddings: bool = True  # the output layer is the embedding
    qk_norm: bool = False  # norms of queries and keys
    qkv_bias: bool = False  # of most families with it also the projection behind attention
    mlp_bias: bool = False  # in the MLP
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
    linear: LinearConfig = field(default_factory=LinearConfig)
    scales: ScalesConfig = field(default_factory=ScalesConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    init_std: float = 0.02  # of random weights
    init: str = "random"  # random, a Hugging Face folder, a run folder, or a checkpoint
    tokenizer: str = ""  # a Hugging Face tokenizer folder; empty: the one in `model.init`
    dtype: str = "auto"  # auto, float32, bfloat16
    recompute: str = "none"  # none, full (recompute every layer's activations in backward)
    kernels: str = (
        "auto"  # auto (te on a GPU, where it imports and knows the model), own, te (TransformerEngine's modules)
    )
    varlen_attention: bool = False  # on CUDA: attention of rows of any length in one call, without padding and masks

    def __post_init__(self) -> None:
        one_of("model.family", self.family, tuple(FAMILIES))
        check_moe_family(self.family, self.moe)
        check_traits(self)
        check_latent(self)
        check_layers(self.attention, self.num_layers)
        check_dense_layers(self.moe, self.num_layers)
        check_linear(self)
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "max_position"):
            at_least(f"model.{name}", getattr(self, name), 1)
        above("model.rope_base", self.rope_base, 0)
        at_least("model.head_dim", self.head_dim, 0)
        at_least("model.vocab_size", self.vocab_size, 0)
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        one_of("model.kernels", self.kernels, KERNELS)
        one_of("model.recompute", self.recompute, ("none", "full"))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}")
        if not (self.head_dim or self.latent.kv_rank) and self.hidden_size % self.num_heads:
            raise ConfigError(
                "model.hidden_size", self.hidden_size, f"a multiple of model.num_heads={self.num_heads}, or head_dim"
            )
        check_rope(self.rope_scaling, self.rotary_dim)

    @property
    def traits(self) -> Family:
        """What is true of all models of its family."""
        return FAMILIES[self.family]

    @property
    def kv_channels(self) -> int:
        """Numbers of a head of queries, and of keys."""
        return self.head_dim or self.latent.head_dim or self.hidden_size // self.num_heads

    @property
    def value_channels(self) -> int:
        """Numbers of a head of values."""
        return self.latent.value_dim or self.kv_channels

    @property
    def latent_queries(self) -> bool:
        return self.latent.query_rank > 0

    @property
    def direct_queries(self) -> bool:
        return not self.latent_queries

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rotary_dim or int(self.kv_channels * self.attention.rotary_fraction)

    @property
    def output_bias(self) -> bool:
        return self.qkv_bias and self.traits.output_bias

    @property
    def expert_ffn(self) -> int:
        return self.moe.ffn_hidden_size or self.ffn_hidden_size

    @property
    def queries_per_group(self) -> int:
        """Heads that the queries' product makes for each of keys: queries and, in some families, their gates."""
        return self.num_heads * (2 if self.traits.gated_attention else 1) // self.num_kv_heads

    def layer_kinds(self, layer: int) -> tuple[str, ...]:
        """Layer 0, 1, ... has the rows of the family's table that are of one of these kinds, or of none. Its MLP:
        "dense", or "sparse" with experts. Before it: "attention", or "linear"."""
        sparse = self.moe.num_experts and layer not in self.moe.dense_layers
        return "sparse" if sparse else "dense", "linear" if self.linear.is_linear(layer) else "attention"

    def layers_of(self, kind: str) -> list[int]:
        return [layer for layer in range(self.num_layers) if kind in self.layer_kinds(layer)]

    @property
    def mixed_layers(self) -> bool:
        """Whether not all layers have the same parameters."""
        return len({self.layer_kinds(layer) for layer in range(self.num_layers)}) > 1


def for_run(shape: ModelConfig, run: ModelConfig) -> ModelConfig:
    """A shape found in a folder, with what the run decides."""
    moe = replace(shape.moe, **{name: getattr(run.moe, name) for name in MOE_OF_THE_RUN})
    rope = replace(shape.rope_scaling, factors=run.rope_scaling.factors)
    return replace(shape, moe=moe, rope_scaling=rope, **{name: getattr(run, name) for name in OF_THE_RUN})


def check_traits(model: ModelConfig) -> None:
    """Raises ConfigError for a key that models of this family do not have."""
    varies = model.traits.varies
    for key, value, plain in unusual(model):
        if key not in varies:
            having = ", ".join(name for name, family in FAMILIES.items() if key in family.varies)
            raise ConfigError(f"model.{key}", value, f"{plain} with model.family={model.family}: {having} have it")
    window = model.attention.window
    if "attention.local_rope_base" in varies and not window:
        raise ConfigError("model.attention.window", 0, f"at least 1 for model.family={model.family}")
    for key in LAYERS:
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
