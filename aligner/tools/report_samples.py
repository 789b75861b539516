"""Samples and trajectories of a run, for report.html: everything a model wrote is escaped."""

from __future__ import annotations

from html import escape
from typing import Any

from aligner.tools import svg
from aligner.tools.report_runs import Run

SAMPLE_STEPS = 5  # the last ones shown of each run


def sample_tables(run: Run) -> str:
    steps = sorted({row["step"] for row in run.samples})[-SAMPLE_STEPS:]
    return "".join(_sample_table(run, step, step == steps[-1]) for step in reversed(steps))


def _sample_table(run: Run, step: float, opened: bool) -> str:
    rows = [row for row in run.samples if row["step"] == step]
    scores = list(dict.fromkeys(name for row in rows for name in _mapping(row, "scores")))
    columns = list(dict.fromkeys(name for row in rows for name in _mapping(row, "columns")))
    names = ("prompt", "response", "reward", *scores, "advantage", "end", *columns)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for row in rows:
        numbers = [row.get("reward"), *(_mapping(row, "scores").get(name) for name in scores), row.get("advantage")]
        texts = [_mapping(row, "columns").get(name) for name in columns]
        cells = [f'<td class="text">{escape(str(row.get(name, "")))}</td>' for name in ("prompt", "response")]
        cells += [f"<td>{cell(value)}</td>" for value in numbers]
        cells.append(f"<td>{'stop' if row.get('finished') else 'limit'}</td>")
        cells += [f'<td class="text">{cell(value)}</td>' for value in texts]
        body += f"<tr>{''.join(cells)}</tr>"
    return (
        f"<details{' open' if opened else ''}><summary>{escape(run.name)}, step {cell(step)}</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div></details>'
    )


def trajectories(run: Run) -> str:
    """Whole, turn by turn, of the last steps; what the policy said, and so is trained on, is marked."""
    rows = [row for row in run.samples if _mapping(row, "trajectory")]
    steps = sorted({row["step"] for row in rows})[-SAMPLE_STEPS:]
    return "".join(_trajectory(run, row) for step in reversed(steps) for row in rows if row["step"] == step)


def _trajectory(run: Run, row: dict[str, Any]) -> str:
    told = _mapping(row, "trajectory")
    turns = told.get("turns")
    body = _turn("prompt", str(row.get("prompt", "")), "")
    for turn in turns if isinstance(turns, list) else ():
        turn = turn if isinstance(turn, dict) else {}
        notes = [f"{cell(turn['tokens'])} tokens in the loss"] if "tokens" in turn else ["not in the loss"]
        notes += [f"turn reward {cell(turn['reward'])}"] if turn.get("reward") else []
        body += _turn(str(turn.get("role", "")), str(turn.get("text", "")), ", ".join(notes), "tokens" in turn)
    known = {"reward": row.get("reward"), **_mapping(row, "scores"), "advantage": row.get("advantage")}
    numbers = ", ".join(f"{escape(name)} {cell(value)}" for name, value in known.items() if value is not None)
    end = " ".join(str(told[name]) for name in ("stop", "failure") if told.get(name))
    head = f"{escape(run.name)}, step {cell(row['step'])}: {'; '.join(filter(None, (numbers, escape(end))))}"
    return f"<details><summary>{head}</summary>{body}</details>"


def _turn(role: str, text: str, note: str, own: bool = False) -> str:
    kind = "turn own" if own else "turn"
    return f'<div class="{kind}"><small>{escape(role)} {note}</small><pre>{escape(text)}</pre></div>'


def _mapping(row: dict[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def cell(value: Any) -> str:
    if isinstance(value, float):
        return svg.number(value)
    return "" if value is None else escape(str(value))
