"""Requests of the page of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aligner.board.series import number
from aligner.config.checks import one_of
from aligner.foreign import JsonObject

ORDERS = ("newest", "best", "worst")  # the last two by reward


@dataclass(frozen=True)
class Query:
    text: str = ""  # in the prompt, in any case
    low: float = -math.inf  # of the reward
    high: float = math.inf
    order: str = "newest"
    page: int = 0

    @classmethod
    def read(cls, request: JsonObject) -> Query:
        """Read a request. Raises AlignerError."""
        order = request.text("order", "newest")
        one_of("order", order, ORDERS)
        bounds = request.number("low", -math.inf), request.number("high", math.inf)
        return cls(request.text("text", "").casefold(), *bounds, order, request.integer("page", 0))

    def takes(self, prompt: Any) -> bool:
        return self.text in str(prompt).casefold()

    def within(self, reward: float | None) -> bool:
        """Return whether a reward is within the bounds. A sample without a reward is only within open bounds."""
        bounded = self.low > -math.inf or self.high < math.inf
        return not bounded if reward is None else self.low <= reward <= self.high


def rounded(value: Any) -> float | None:
    """Round to as many digits as a reader needs; None unless the value is a finite number."""
    shown = number(value)
    return None if shown is None else float(f"{shown:.5g}")
