"""Layers with a memory of fixed size in place of attention (`ops/kernels/linear_rules.py`): `model.linear.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.key import Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.sections.model.config import ModelConfig


@dataclass
class LinearConfig(Section, key="model.linear"):
    """Keys of linear layers. Every layer is linear except those listed with attention."""

    key_heads: int = key(0, "Heads of keys. 0: no layer is linear.", least=0)
    value_heads: int = key(0, "Heads of values and outputs, a multiple of the heads of keys.", least=0)
    key_head_dim: int = key(0, "Width of a head of queries and keys.", least=0)
    value_head_dim: int = key(0, "Width of a head of values and outputs.", least=0)
    conv: int = key(0, "Number of inputs that a token's channels mix, its own included.", least=0)
    attention_every: int = key(0, "Interval of layers with attention: n, 2n, ... 0: none.", least=0)
    attention_layers: list[int] = key([], "Additional layers with attention, counted from 0.")
    rule: str = key(
        "delta",
        "How a layer remembers: delta (gated delta rule, arXiv:2412.06464), or mamba2 (arXiv:2405.21060; its groups "
        "are heads of keys, its states' size is the width of keys).",
        choices=("delta", "mamba2"),
    )

    RULES = rules("""
key_heads => value_heads, key_head_dim, value_head_dim, conv >=1
key_heads => value_heads %key_heads
""")

    def is_linear(self, layer: int) -> bool:
        """Return whether layer 0, 1, ... is linear."""
        regular = self.attention_every and (layer + 1) % self.attention_every == 0
        return self.key_heads > 0 and not (regular or layer in self.attention_layers)

    @property
    def values_per_key(self) -> int:
        """Heads of values that share queries and keys."""
        return self.value_heads // max(1, self.key_heads)

    @property
    def parts(self) -> list[int]:
        """Channels of one key head: its query, its key, its values, gates of their outputs, and for each head of
        values how far it moves, and forgets: two numbers, or one for both."""
        heads, key = self.values_per_key, self.key_head_dim
        values = heads * self.value_head_dim
        return [key, key, values, values, *[heads] * (2 if self.rule == "delta" else 1)]

    @property
    def mixed_width(self) -> int:
        """Channels of one key head that are mixed: its query, its key, its values."""
        return sum(self.parts[:3])

    @property
    def gated_width(self) -> int:
        """The same with the gates of its values' outputs."""
        return sum(self.parts[:4])

    @property
    def width(self) -> int:
        return sum(self.parts)

    @property
    def numbers(self) -> int:
        return sum(self.parts[4:])


def check_linear(model: ModelConfig) -> None:
    linear, layers = model.linear, model.num_layers
    if model.pattern:
        return
    beyond = [layer for layer in linear.attention_layers if not 0 <= layer < layers]
    if beyond:
        raise ConfigError("model.linear.attention_layers", beyond, f"layers from 0 to {layers - 1}")
    if layers and all(linear.is_linear(layer) for layer in range(layers)):
        expected = f"at most model.num_layers={layers}, so that a layer has attention"
        raise ConfigError("model.linear.attention_every", linear.attention_every, expected)
