"""Endpoints of the pages of runs and curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aligner.board.runs import FROM, Answer, Board, RunFolder, flat, mapping
from aligner.board.series import SO_FAR, STEP_S, TOKENS, Points, number, thin
from aligner.foreign import JsonObject
from aligner.run.metrics import HEADLINE, finite

POINTS = 400  # of a curve, unless more are asked for
MOST, FEWEST = 2000, 100
TOGETHER = 500_000  # points of all curves unless more are asked for: a report of many runs stays small
LONGEST = 10_000  # characters of a value
BINS = 120  # of the breakdown by phase
GROUPS = ("eval", "reward", "sft", "rm", "dpo", "kto", "distill", "rewards", "logps", "preference", "length")
GROUPS += ("response", "policy", "kl", "critic", "advantage", "mismatch", "staleness")
LATE_GROUPS = ("throughput", "refit", "batch", "memory", "time")
LATER = ("time/save_s", "time/export_s")  # these come after the step was measured


def alone(answer: Answer) -> Answer:
    """Decorate an endpoint so that it handles one request at a time, as the runs' state changes while they are read."""

    @functools.wraps(answer)
    def held(board: Board, request: JsonObject) -> Any:
        with board.lock:
            return answer(board, request)

    return held


@alone
def table(board: Board, request: JsonObject) -> Any:
    """Return a row for each run, in the order of their starts: its state, and the last values of the headline
    metrics."""
    runs = board.chosen(request)
    board.look(runs)
    folders, jobs = {run.folder.resolve(): run.name for run in runs}, board.jobs()
    rows = [_guarded(run, lambda run: _row(run, jobs, folders), _damaged(run)) for run in runs]
    rows.sort(key=lambda row: row["started"] or "later")
    headline = [name for name in HEADLINE if any(name in row["last"] for row in rows)]
    return {"folders": [str(folder) for folder in board.folders], "headline": headline, "runs": rows}


def _guarded[T](run: RunFolder, read: Callable[[RunFolder], T], fallback: Callable[[], T]) -> T:
    """Return what `read` returns, or `fallback` on an error, so that a damaged folder does not affect other runs."""
    try:
        return read(run)
    except Exception as error:
        run.fail(error)
        return fallback()


def _damaged(run: RunFolder) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the row of a run that cannot be read."""
    empty = dict.fromkeys(("job", "step", "steps", "left_s", "step_s", "goodput", "tokens_per_s", "peak_bytes"))
    texts = {"chain": run.folder.parent.name, "stage": "", "state": "damaged", "started": "", "result": ""}
    lists = {"from": {}, "last": {}, "alarms": 0, "read": 1.0}
    return lambda: {"name": run.name, **texts, **empty, **lists, "damage": run.damage}


def _row(run: RunFolder, jobs: dict[str, str], folders: dict[Path, str]) -> dict[str, Any]:
    series, settings, state = run.series, run.settings, run.state(jobs)
    step, step_s = series.newest("step"), series.newest(STEP_S)
    total = number(settings.get("run.steps"))
    running = state in ("running", "RUNNING")
    peaks = [series.newest(name) for name in series.names() if name.startswith("memory/") and "peak" in name]
    last = {name: value for name in HEADLINE if (value := series.newest(name)) is not None}
    return {
        "name": run.name,
        "chain": run.folder.resolve().parent.name,
        "stage": text(settings.get("stage.name")),
        "from": {key: name for key in FROM if (name := _named(settings.get(key), folders)) not in ("", run.name)},
        "state": state,
        "job": run.job,
        "step": step,
        "steps": total,
        "left_s": number((total - (step or 0)) * step_s) if running and total and step_s else None,
        "step_s": step_s,
        "goodput": run.goodput(running),
        "tokens_per_s": series.newest("throughput/tokens_per_s"),
        "peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "alarms": len(run.alarms),
        "started": text(run.start.get("started")),
        "result": run.result,
        "read": series.share_read,
        "last": last,
        "damage": run.damage,  # after all files were read
    }


def _named(value: Any, folders: dict[Path, str]) -> str:
    """Return the run in whose folder a path lies."""
    if not isinstance(value, str) or not value:
        return ""
    path = Path(value).absolute()
    return next((folders[parent] for parent in (path, *path.parents[:3]) if parent in folders), "")


@alone
def metrics(board: Board, request: JsonObject) -> Any:
    """Return the runs' metrics in the order of the page: the last value of each run, and the only value of a metric
    that never changes."""
    runs = board.chosen(request)
    board.look(runs)
    by_group: dict[str, list[str]] = {}
    for name in sorted(set().union(*(run.series.names() for run in runs))):
        by_group.setdefault(name.split("/")[0], []).append(name)
    others = sorted(set(by_group) - set(GROUPS) - set(LATE_GROUPS))
    rows = [
        _metric(n, runs) for group in (*GROUPS, *others, *LATE_GROUPS) if group in by_group for n in by_group[group]
    ]
    return {"metrics": [row for row in rows if row["last"]], "read": {run.name: run.series.share_read for run in runs}}


def _metric(name: str, runs: list[RunFolder]) -> dict[str, Any]:
    ranges = [values for run in runs if len(values := _finite(run.series.points(name)))]
    several = any(len(values) > 1 for values in ranges)  # else it could not change
    low, high = min((v.min() for v in ranges), default=math.nan), max((v.max() for v in ranges), default=math.nan)
    last = {run.name: value for run in runs if (value := run.series.newest(name)) is not None}
    return {"name": name, "still": float(low) if several and low == high else None, "last": last}


def _finite(points: Points) -> np.ndarray:
    return points[1][~np.isnan(points[1])]


@alone
def curves(board: Board, request: JsonObject) -> Any:
    """Return curves of each run by metric, and its clocks: seconds since it began and tokens, by step."""
    runs = board.chosen(request)
    share = TOGETHER // max(1, sum(len(run.series.names()) for run in runs))
    most = min(MOST, request.integer("points", max(FEWEST, min(POINTS, share)), low=2))
    drawn_by_run, clocks = {}, {}
    for run in runs:
        wanted = request.texts("metrics", sorted(run.series.names()))
        drawn = {name: _curve(run.series.points(name), most) for name in wanted}
        drawn_by_run[run.name] = {name: curve for name, curve in drawn.items() if curve["x"]}
        clocks[run.name] = _clock(run)
    return {"curves": drawn_by_run, "clocks": clocks}


def _clock(run: RunFolder) -> dict[str, Any]:
    steps, walls = run.series.points("wall_time")
    begun = float(walls[0]) if len(walls) and not math.isnan(walls[0]) else 0.0
    passed = _curve((steps, walls - begun), POINTS)
    return {"begun": begun, "wall": passed, "tokens": _curve(run.series.points(TOKENS), POINTS)}


def _curve(points: Points, most: int) -> dict[str, list[Any]]:
    """Return about `most` points at most; null is a gap."""
    steps, values = thin(points, 2 * math.ceil(len(points[0]) / most))
    return {"x": steps.tolist(), "y": [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]}


@alone
def phases(board: Board, request: JsonObject) -> Any:
    """Return the seconds by phase, in all and of a step along the run. Phases with a slash are contained in others."""
    runs = board.chosen(request)
    return {"phases": {run.name: split for run in runs if (split := _guarded(run, _phases, lambda: None))}}


def _phases(run: RunFolder) -> dict[str, Any] | None:
    series = run.series
    parts = [n for n in sorted(series.names()) if n.startswith("time/") and n.count("/") == 1 and n != STEP_S]
    so_far = {name: series.points(SO_FAR + name) for name in (*parts, STEP_S)}
    known = [points for points in so_far.values() if len(points[0])]
    if not known:
        return None
    first, last = min(int(p[0].min()) for p in known) - 1, max(int(p[0].max()) for p in known)
    edges = np.unique(np.linspace(first, last, min(BINS, last - first) + 1).round())
    within = {name: np.diff(_until(points, edges)) for name, points in so_far.items() if len(points[0])}
    whole = within.pop(STEP_S, None)
    seconds = {name: float(points[1][-1]) for name, points in so_far.items() if name in within}
    if whole is not None:
        inner = sum((row for name, row in within.items() if name not in LATER), np.zeros(len(whole)))
        rest = (whole - inner).clip(0)
        if rest.sum() > 1e-9 * whole.sum():
            within["time/other_s"], seconds["time/other_s"] = rest, float(rest.sum())
    layers = {name: [float(f"{v:.4g}") for v in (row / np.diff(edges)).tolist()] for name, row in within.items()}
    return {"x": edges[1:].tolist(), "layers": layers, "seconds": seconds}


def _until(points: Points, edges: np.ndarray) -> np.ndarray:
    """Return the value at the last point up to each edge. Steps taken again add to the last before them."""
    reached = np.concatenate([[0.0], points[1]])
    return reached[np.searchsorted(np.maximum.accumulate(points[0]), edges, side="right")]


@alone
def details(board: Board, request: JsonObject) -> Any:
    """Return the runs' origins and alarms, and the keys in which their configs differ."""
    runs = board.chosen(request)
    settings = {run.name: run.settings for run in runs}
    keys = dict.fromkeys(key for one in settings.values() for key in one)
    values = {key: {name: text(one[key]) for name, one in settings.items() if key in one} for key in keys}
    differ = {key: row for key, row in values.items() if len(row) < len(runs) or len(set(row.values())) > 1}
    by_run = {run.name: _guarded(run, _details, partial(_no_details, run)) for run in runs}
    if not request.flag("report", False):  # which others are sent
        for run in runs:
            by_run[run.name]["logs"] = _guarded(run, lambda run: run.logs, dict)
    return {"details": by_run, "differ": differ if len(runs) > 1 else {}, "summary": summary(board.folders)}


def summary(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the fields of the folders' summary.json by dotted key: results of a chain, such as the quick start's."""
    values = {key: value for folder in folders for key, value in flat(RunFolder(folder).summary) if key}
    return {key: text(value) if number(value) is None else value for key, value in values.items()}


def _details(run: RunFolder) -> dict[str, Any]:
    return {
        "facts": {name: value for name, value in _facts(run).items() if value not in (None, "")},
        "alarms": [{"step": finite(alarm.get("step")), "text": text(alarm.get("text"))} for alarm in run.alarms],
        "config": run.config,
        "damage": run.damage,  # after all files were read
    }


def _no_details(run: RunFolder) -> dict[str, Any]:
    return {"facts": {"folder": str(run.folder)}, "alarms": [], "config": "", "damage": run.damage}


def _facts(run: RunFolder) -> dict[str, Any]:
    settings, latest = run.settings, run.start
    first = next((record for record in run.starts if "started" in record), {})
    hardware = mapping(latest.get("hardware"))
    commit = text(latest.get("commit"))[:12] + (" with changes" if latest.get("dirty") else "")
    return {
        "folder": str(run.folder),
        "stage": text(settings.get("stage.name")),
        "model": text(settings.get("model.family")),
        "parameters": number(latest.get("parameters")),
        "seed": text(settings.get("seed")),
        "duration": run.seconds(),
        "started": text(first.get("started")),
        "starts": sum("started" in record for record in run.starts) or None,
        "ranks": text(latest.get("ranks")),
        "host": text(latest.get("host")),
        "hardware": text(hardware.get("gpu") or hardware.get("cpu")),
        "commit": commit,
        "versions": ", ".join(f"{name} {version}" for name, version in mapping(latest.get("versions")).items()),
        "command": text(latest.get("command")),
    }


def text(value: Any) -> str:
    """Return any JSON or YAML value as text, at most LONGEST characters."""
    try:
        return "" if value is None else str(value)[:LONGEST]
    except (ValueError, RecursionError):  # an integer of too many digits; too deep
        return "?"
