"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): `model.latent.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


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
