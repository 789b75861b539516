"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): `model.latent.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.key import Section, key
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.sections.model.config import ModelConfig


@dataclass
class LatentConfig(Section, key="model.latent"):
    """Keys and values of all heads are made of one latent vector for each token, and of one rotated key for all heads.
    A head of queries and keys is `plain_dim` numbers that are not rotated, then `rotary_dim` that are."""

    kv_rank: int = key(0, "Numbers of the latent vector of keys and values. 0: no latent attention.", least=0)
    query_rank: int = key(0, "Numbers of the latent vector of queries. 0: queries come from the hidden state.", least=0)
    plain_dim: int = key(0, "Numbers of a head of queries and keys that are not rotated.", least=0)
    rotary_dim: int = key(0, "Numbers of a head that are rotated; of keys the same for all heads.", least=0)
    value_dim: int = key(0, "Numbers of a head of values.", least=0)
    neighbours: bool = key(True, "Rotate neighbouring numbers together, not halves.")

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rotary_dim


def check_latent(model: ModelConfig) -> None:
    """That families without latent attention have none is checked with the other traits."""
    latent = model.latent
    if not model.traits.latent:
        return
    for name in ("kv_rank", "plain_dim", "rotary_dim", "value_dim"):
        if not getattr(latent, name):
            raise ConfigError(f"model.latent.{name}", 0, f"at least 1 for model.family={model.family}")
    if latent.rotary_dim % 2:
        raise ConfigError("model.latent.rotary_dim", latent.rotary_dim, "an even number")
    if model.num_kv_heads != model.num_heads:
        expected = f"model.num_heads={model.num_heads} with latent attention, which makes a key of each head"
        raise ConfigError("model.num_kv_heads", model.num_kv_heads, expected)
    if model.head_dim not in (0, latent.head_dim):
        expected = f"0, or model.latent.plain_dim + rotary_dim = {latent.head_dim}"
        raise ConfigError("model.head_dim", model.head_dim, expected)
