"""Attention patterns, scales and rotation that differ between families: `model.attention.*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.config.key import Section, key
from aligner.errors import ConfigError


@dataclass
class AttentionConfig(Section, key="model.attention"):
    """Kinds of layers. In a local layer a query sees the last `window` tokens of its row, itself included; other
    layers are global."""

    window: int = key(
        0,
        "Number of a row's last tokens, itself included, that a query sees in local layers. 0: all layers are global.",
        least=0,
    )
    global_every: int = key(0, "With a window, layers n, 2n, ... are global. 0: none is.", least=0)
    local_rope_base: float = key(
        0.0, "Base of the rotary frequencies of local layers, which are not scaled. 0: as in global layers.", least=0
    )
    global_head_dim: int = key(0, "Width of a head in global layers, in families that have it.", least=0)
    global_kv_heads: int = key(0, "Heads of keys and values in global layers. 0: model.num_kv_heads.", least=0)
    key_is_value: bool = key(False, "In global layers values are the keys before their norm, without a matrix.")
    kv_shared_layers: int = key(
        0,
        "Number of layers, the last ones, without keys and values of their own: each uses those of the last layer "
        "before them of its kind, local or global.",
        least=0,
    )
    query_scale_dim: int = key(0, "Divide queries by the square root of this. 0: model.head_dim.", least=0)
    global_layers: list[int] = key([], "Additional global layers, counted from 0.")
    nope_layers: list[int] = key([], "Layers, counted from 0, without positions (no rotation).")
    rotary_fraction: float = key(1.0, "Fraction of a head's numbers, from the first, to rotate.", least=0, most=1)
    multiplier: float = key(0.0, "Factor of scores. 0: 1 / sqrt(query_scale_dim).", least=0)
    softcap: float = key(0.0, "Cap of scores x, which become softcap * tanh(x / softcap). 0: off.", least=0)

    def is_local(self, layer: int) -> bool:
        """Return whether layer 0, 1, ... is local."""
        regular = self.global_every and (layer + 1) % self.global_every == 0
        return self.window > 0 and not (regular or layer in self.global_layers)

    @property
    def own_values(self) -> bool:
        return not self.key_is_value

    @property
    def scale(self) -> float | None:
        """The factor of scores; None: 1 / sqrt(head_dim)."""
        return self.multiplier or (self.query_scale_dim**-0.5 if self.query_scale_dim else None)


@dataclass
class ScalesConfig(Section, key="model.scales"):
    """Factors that some families apply between their modules."""

    embedding: float = key(1.0, "Factor of embeddings.", above=0)
    residual: float = key(1.0, "Factor of attention's and the MLP's addition to the residual stream.", above=0)
    logits: float = key(1.0, "Divisor of logits.", above=0)
    logits_softcap: float = key(0.0, "Cap of logits z, which become softcap * tanh(z / softcap). 0: off.", least=0)


def layer_pattern(is_global: Sequence[bool]) -> dict[str, object]:
    """Return the fields of `AttentionConfig` that say which layers are global, in the shortest form."""
    layers = [layer for layer, yes in enumerate(is_global) if yes]
    every = layers[0] + 1 if layers else 0
    if not layers or layers == list(range(every - 1, len(is_global), every)):
        return {"global_every": every}
    return {"global_layers": layers}


def check_layers(attention: AttentionConfig, layers: int) -> None:
    shared = attention.kv_shared_layers
    local = [attention.is_local(layer) for layer in range(min(layers, 1 << 16) if shared else 0)]
    if shared and set(local[: max(0, layers - shared)]) != set(local):
        most = layers - 1 - max(local.index(kind) for kind in set(local))
        expected = f"at most {most}, so that layers of each kind before them have keys and values"
        raise ConfigError("model.attention.kv_shared_layers", shared, expected)
    for name in ("global_layers", "nope_layers"):
        beyond = [layer for layer in getattr(attention, name) if not 0 <= layer < layers]
        if beyond:
            raise ConfigError(f"model.attention.{name}", beyond, f"layers from 0 to {layers - 1}")
