"""Prompts and responses for people to read: a table on the terminal, and samples.jsonl for the report.

The texts come from a model: markup in them is not interpreted, and control characters (which could move the cursor or
recolour a terminal) are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.run.metrics import finite

FILE = "samples.jsonl"


@dataclass(frozen=True)
class SampleRow:
    prompt: str
    response: str
    reward: float
    advantage: float | None  # None where no update follows
    finished: bool  # ended by a stop token, not by the limit
    scores: Mapping[str, float | None] = field(default_factory=dict)  # of each reward function, unweighted
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns, such as the reference answer
    trajectory: Mapping[str, Any] | None = None  # of several turns: stop, failure, reward, turns with role and text

    def record(self) -> dict[str, Any]:
        """Return a record for JSON; NaN (an invalid reward) becomes null."""
        several_turns = {} if self.trajectory is None else {"trajectory": self._plain(self.trajectory)}
        return {
            "prompt": self.prompt,
            "response": self.response,
            "reward": finite(self.reward),
            "advantage": finite(self.advantage),
            "finished": self.finished,
            "scores": {name: finite(value) for name, value in self.scores.items()},
            "columns": {name: plain(value) for name, value in self.columns.items()},
            **several_turns,
        }

    def shown(self) -> tuple[str, str]:
        """Return the response for a terminal, of a trajectory all its turns, each behind its role; and why it ended."""
        if (several := self.trajectory) is None:
            return printable(self.response), "stop" if self.finished else "limit"
        turns = [f"{turn['role']}: {turn['text']}" for turn in several["turns"]]
        return "\n".join(map(printable, (*turns, *filter(None, [several["failure"]])))), several["stop"]

    @staticmethod
    def _plain(trajectory: Mapping[str, Any]) -> dict[str, Any]:
        turns = [turn | {"text": plain(turn["text"], limit=20_000)} for turn in trajectory["turns"]]
        return {**trajectory, "reward": finite(trajectory["reward"]), "turns": turns}


def plain(value: Any, limit: int = 2000) -> Any:
    """Return a column's value for JSON: numbers unchanged, texts and anything else as text, cut to `limit`."""
    if value is None or isinstance(value, bool | int | float):
        return finite(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[:limit] + " ..."


def printable(text: str, limit: int = 400) -> str:
    """Return at most `limit` characters, line breaks kept, other control characters as escapes."""
    cut = text if len(text) <= limit else text[:limit] + " ..."
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut)


def print_samples(title: str, rows: Sequence[SampleRow], n: int, console: Console | None = None) -> None:
    """Print a table of the first n rows, with columns for advantages and for scores of several functions if there are
    any."""
    if n <= 0 or not rows:
        return
    table = Table(title=title, show_lines=True, title_justify="left")
    advantages = any(row.advantage is not None for row in rows[:n])
    several = any(len(row.scores) > 1 for row in rows[:n])
    for column in ("prompt", "response", "reward", *["advantage"] * advantages, "end", *["scores"] * several):
        table.add_column(column, justify="right" if column in ("reward", "advantage") else "left", overflow="fold")
    for row in rows[:n]:
        response, end = row.shown()
        scores = [f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in row.scores.items()]
        table.add_row(
            Text(printable(row.prompt)),
            Text(response),
            f"{row.reward:.3g}",
            *(["" if row.advantage is None else f"{row.advantage:+.3g}"] if advantages else []),
            end,
            *([Text("\n".join(scores))] if several else []),
        )
    (console or Console(stderr=True)).print(table)
