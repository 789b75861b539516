"""The tabs of the board: what each may ask, and what a report holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aligner.board import chat, compose, jobs, samples, told
from aligner.board.runs import Answer


@dataclass(frozen=True)
class Page:
    """A tab: assets/NAME.js, and the endpoints that it asks. `report`: what a report asks of them, by their names; the
    answers are inlined. A page without has no place in reports."""

    endpoints: Mapping[str, Answer] = field(default_factory=dict)
    report: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


PAGES = {
    "runs": Page({"runs": told.table, "details": told.details}, {"runs": {}, "details": {"report": True}}),
    "curves": Page(
        {"metrics": told.metrics, "curves": told.curves, "phases": told.phases},
        {"metrics": {}, "curves": {}, "phases": {}},
    ),
    "samples": Page(
        {"samples": samples.samples, "sample_tokens": samples.sample_tokens}, {"samples": {"report": True}}
    ),
    "compose": Page(
        {"form": compose.form, "check": compose.check, "jobs": jobs.jobs, "start": jobs.start, "stop": jobs.stop}
        | {"dry_run": jobs.dry_run, "submit": jobs.submit}
    ),
    "chat": Page({"talks": chat.talks, "open_talk": chat.open_talk, "close_talk": chat.close_talk, "say": chat.say}),
}
