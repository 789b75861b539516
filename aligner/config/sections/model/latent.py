"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): `model.latent.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


@dataclass
class LatentConfig(Section, key="model.latent"):
    """Keys of latent attention. Keys and values of all heads come from one latent vector per token, and one rotated
    key for all heads. A head of queries and keys is `plain_dim` numbers that are not rotated, then `rotary_dim` that
    are."""

    kv_rank: int = key(0, "Width of the latent vector of keys and values. 0: no latent attention.", least=0)
    query_rank: int = key(0, "Width of the latent vector of queries. 0: queries come from the hidden state.", least=0)
    plain_dim: int = key(0, "Unrotated width of a head of queries and keys.", least=0)
    rotary_dim: int = key(0, "Rotated width of a head. That of keys is the same for all heads.", least=0)
    value_dim: int = key(0, "Width of a head of values.", least=0)
    output_groups: int = key(
        0, "Groups of heads whose outputs a matrix of their own narrows, before one for all. 0: none.", least=0
    )
    output_rank: int = key(0, "Width of a group's narrowed output.", least=0)
    neighbours: bool = key(True, "Rotate pairs of neighbouring numbers, not halves.")

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rotary_dim
