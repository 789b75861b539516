"""What differs between families in what a query sees, and how it is scaled and rotated: `model.attention.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least
from aligner.errors import ConfigError

WINDOW_FAMILIES = ("mistral", "gemma3_text")


@dataclass
class AttentionConfig:
    """A layer is local, where a query sees the last `window` tokens of its row, itself included, or global."""

    window: int = 0  # 0: every layer is global
    global_every: int = 0  # with a window: layers n, 2n, ... are global; 0: none is
    local_rope_base: float = 0.0  # of local layers, whose angles are then not scaled; 0: those of the others
    query_scale_dim: int = 0  # queries are divided by its square root; 0: model.head_dim

    def __post_init__(self) -> None:
        for name in ("window", "global_every", "local_rope_base", "query_scale_dim"):
            at_least(f"model.attention.{name}", getattr(self, name), 0)

    def is_local(self, layer: int) -> bool:
        """Of layer 0, 1, ..."""
        return self.window > 0 and not (self.global_every and (layer + 1) % self.global_every == 0)


def check_attention_family(family: str, attention: AttentionConfig) -> None:
    if family not in WINDOW_FAMILIES and attention != AttentionConfig():
        expected = f"one of {', '.join(WINDOW_FAMILIES)} with model.attention set"
        raise ConfigError("model.family", family, expected)
    if family == "mistral" and attention != AttentionConfig(attention.window):
        raise ConfigError("model.attention", attention, "nothing but a window for model.family=mistral")
    if family == "gemma3_text" and not attention.window:
        raise ConfigError("model.attention.window", 0, "at least 1 for model.family=gemma3_text")
