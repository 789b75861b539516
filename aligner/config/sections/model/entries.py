"""Attention to entries that stand for several tokens (DeepSeek-V4, section 2.3): `model.entries.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key
from aligner.config.rule import rules


@dataclass
class EntriesConfig(Section, key="model.entries"):
    """Keys of compressed attention. In global layers (`model.attention`) a query sees the tokens of the window, and
    entries: each is a weighted sum of adjacent tokens. Of `tokens` tokens, of which `model.indexer` chooses some, or
    of `heavy_tokens`, of which it sees all."""

    tokens: int = key(0, "Tokens of an entry in global layers. 0: no entries.", least=0)
    heavy_tokens: int = key(0, "Tokens of an entry in heavy layers.", least=0)
    heavy_layers: list[int] = key([], "Global layers, counted from 0, that are heavy.")

    RULES = rules("tokens => heavy_tokens >=1")
