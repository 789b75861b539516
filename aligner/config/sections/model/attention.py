"""What differs between families in what a query sees, and how it is scaled and rotated: `model.attention.*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aligner.config.checks import at_least, within
from aligner.errors import ConfigError


@dataclass
class AttentionConfig:
    """A layer is local, where a query sees the last `window` tokens of its row, itself included, or global."""

    window: int = 0  # 0: every layer is global
    global_every: int = 0  # with a window: layers n, 2n, ... are global; 0: none is
    local_rope_base: float = 0.0  # of local layers, whose angles are then not scaled; 0: those of the others
    query_scale_dim: int = 0  # queries are divided by its square root; 0: model.head_dim
    global_layers: list[int] = field(default_factory=list)  # others that are global, counted from 0
    nope_layers: list[int] = field(default_factory=list)  # layers, from 0, that see no positions (no rotation)
    rotary_fraction: float = 1.0  # of a head's numbers that are rotated, from the first
    multiplier: float = 0.0  # of scores, instead of 1 / sqrt(query_scale_dim); 0: that
    softcap: float = 0.0  # scores x become softcap * tanh(x / softcap); 0: they stay

    def __post_init__(self) -> None:
        for name in ("window", "global_every", "local_rope_base", "query_scale_dim", "multiplier", "softcap"):
            at_least(f"model.attention.{name}", getattr(self, name), 0)
        within("model.attention.rotary_fraction", self.rotary_fraction, 0, 1)

    def is_local(self, layer: int) -> bool:
        """Of layer 0, 1, ..."""
        regular = self.global_every and (layer + 1) % self.global_every == 0
        return self.window > 0 and not (regular or layer in self.global_layers)

    @property
    def scale(self) -> float | None:
        """Of scores; None: 1 / sqrt(head_dim)."""
        return self.multiplier or (self.query_scale_dim**-0.5 if self.query_scale_dim else None)


def layer_pattern(is_global: Sequence[bool]) -> dict[str, object]:
    """The fields of `AttentionConfig` that say which layers are global, as short as they can be."""
    found = [layer for layer, yes in enumerate(is_global) if yes]
    every = found[0] + 1 if found else 0
    if not found or found == list(range(every - 1, len(is_global), every)):
        return {"global_every": every}
    return {"global_layers": found}


def check_layers(attention: AttentionConfig, layers: int) -> None:
    for name in ("global_layers", "nope_layers"):
        beyond = [layer for layer in getattr(attention, name) if not 0 <= layer < layers]
        if beyond:
            raise ConfigError(f"model.attention.{name}", beyond, f"layers from 0 to {layers - 1}")
