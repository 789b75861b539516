"""The section `sampling`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key

BOTH = ("generation", "evaluation")
_NO_EMPTY = (lambda texts: "" not in texts, "texts of at least one character: every text has an empty one")


@dataclass
class SamplingConfig(Section, key="sampling"):
    temperature: float = key(1.0, "Sampling temperature. 0: greedy.", least=0)
    top_p: float = key(1.0, "Total probability of the likeliest tokens to sample from. 1: off.", above=0, most=1)
    top_k: int = key(0, "Number of likeliest tokens to sample from. 0: off.", least=0)
    min_p: float = key(0.0, "Least probability of a token, as a share of the largest one. 0: off.", least=0, most=1)
    max_response_tokens: int = key(64, "Maximum tokens of a response.", least=1, read_for=BOTH)
    stop: list[str] = key([], "Texts that end a response.", valid=_NO_EMPTY, read_for=BOTH)
    special_tokens: str = key(
        "keep",
        "Special tokens in the texts for rewards, judges and samples. keep: all except padding, BOS and the "
        "final stop token; strip: none.",
        choices=("keep", "strip"),
        read_for=BOTH,
    )
