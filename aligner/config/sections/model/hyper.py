"""Hyper-connections (Xie et al. 2026, arXiv:2512.24880; DeepSeek-V4, section 2.2): `model.hyper.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key
from aligner.config.rule import rules


@dataclass
class HyperConfig(Section, key="model.hyper"):
    """Keys of hyper-connections. The residual stream is several streams. Attention and the MLP read a weighted sum of
    them and add to each, and a matrix whose rows and columns sum to 1 mixes them."""

    streams: int = key(0, "Residual streams. 0: one, to which outputs are added.", least=0)
    iterations: int = key(0, "Normalisations of the matrix's rows and columns, by turns.", least=0)
    eps: float = key(1e-6, "Added to its sums and to the factors of what is read.", above=0)

    RULES = rules("streams => iterations >=1")
