"""Tabs of a report: the endpoints that each may ask, and the answers that the report contains. A run that ends imports
no other tabs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.board import curves, samples
from aligner.board.runs import Answer


@dataclass(frozen=True)
class Page:
    """A tab: assets/NAME.js, and the endpoints that it asks. `report`: the requests of a report, by endpoint; their
    answers are inlined."""

    endpoints: Mapping[str, Answer] = field(default_factory=dict)
    report: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


REPORTED = {
    "runs": Page({"runs": curves.table, "details": curves.details}, {"runs": {}, "details": {"report": True}}),
    "curves": Page(
        {"metrics": curves.metrics, "curves": curves.curves, "phases": curves.phases},
        {"metrics": {}, "curves": {}, "phases": {}},
    ),
    "samples": Page(
        {"samples": samples.samples, "sample_tokens": samples.sample_tokens}, {"samples": {"report": True}}
    ),
}
