"""report.html: one self-contained page of curves, samples, alarms and config of one run, or of several side by side.

Everything a model or a dataset wrote is escaped, the page loads nothing and runs no script; it opens on a phone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.files import write_whole
from aligner.foreign import read_record
from aligner.tools import svg
from aligner.tools.report_runs import HEADLINE, Run, duration, flat, is_run, names, number, read_run, run_folders
from aligner.tools.report_samples import cell, sample_tables, trajectories

GROUPS = ("eval", "reward", "sft", "rm", "dpo", "kto", "distill", "rewards", "logps", "preference", "length")
GROUPS += ("response", "policy", "kl", "critic", "advantage", "mismatch", "staleness")
LATE_GROUPS = ("throughput", "refit", "batch", "memory", "time")
GIB = 2**30

STYLE = """
:root{color-scheme:light dark;--fg:#222;--bg:#fff;--line:#8884;--warn:#c33}
@media(prefers-color-scheme:dark){:root{--fg:#ddd;--bg:#16181c}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg);
margin:0 auto;padding:1rem;max-width:1400px}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
.grid-of-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:.8rem}
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:.4rem}
figcaption{font-size:.85rem;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--fg)}svg .grid{stroke:var(--line)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
td,th{border:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top}
td.text{white-space:pre-wrap;overflow-wrap:anywhere;min-width:9rem;max-width:34rem;font-family:monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem}
.turn{margin:.4rem 0;padding:.3rem .6rem;border-left:4px solid var(--line)}.turn.own{border-color:#3a7}
.turn pre{margin:0}.turn small{opacity:.75}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .8em}.alarm{color:var(--warn)}
"""


def metric_names(runs: list[Run]) -> dict[str, list[str]]:
    """group -> its metrics, in the order the report shows them."""
    found: dict[str, list[str]] = {}
    for name in sorted(set().union(*(run.metrics.names() for run in runs))):
        found.setdefault(name.split("/")[0], []).append(name)
    others = sorted(set(found) - set(GROUPS) - set(LATE_GROUPS))
    return {group: found[group] for group in (*GROUPS, *others, *LATE_GROUPS) if group in found}


def legend(names: list[str]) -> str:
    keys = (f'<span class="key" style="background:{svg.color(i)}"></span>{escape(n)}' for i, n in enumerate(names))
    return f"<p>{''.join(keys)}</p>"


def shown(name: str, value: float) -> str:
    """A metric's value in units for people."""
    if name.endswith("_bytes"):
        return f"{value / GIB:.3g} GiB" if abs(value) >= GIB / 100 else f"{value / 2**20:.3g} MiB"
    return svg.number(value)


def chart(name: str, runs: list[Run]) -> str:
    unit, scale = (" (GiB)", GIB) if name.endswith("_bytes") else ("", 1)
    curves = [[(x, None if y is None else y / scale) for x, y in run.metrics.curve(name)] for run in runs]
    picture = svg.lines(name, list(enumerate(curves)))
    if not picture:
        return ""
    several = len(runs) > 1
    last = ", ".join(
        (f"{escape(run.name)} " if several else "") + escape(shown(name, value))
        for run in runs
        if (value := run.last(name)) is not None
    )
    return f"<figure><figcaption><b>{escape(name)}</b>{unit} {last}</figcaption>{picture}</figure>"


def constant(name: str, runs: list[Run]) -> float | None:
    """The only value a metric ever had, over all runs; None if it changes, or has none."""
    values = chain.from_iterable(run.metrics.finite(name) for run in runs)
    first = next(values, None)
    return first if all(value == first for value in values) else None


def group_of_charts(group: str, metrics: list[str], runs: list[Run]) -> str:
    """Charts of what changes; what never does is folded into a table."""
    still = {name: value for name in metrics if (value := constant(name, runs)) is not None}
    charts = "".join(chart(name, runs) for name in metrics if name not in still)
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{shown(name, value)}</td></tr>" for name, value in still.items())
    folded = f"<details><summary>{len(still)} that never change</summary><table>{rows}</table></details>"
    if not charts and not still:
        return ""
    charts = f'<div class="grid-of-charts">{charts}</div>' if charts else ""
    return f"<h2>{escape(group)}</h2>{charts}{folded if still else ''}"


def phases(run: Run) -> str:
    """Seconds of each step, stacked by phase: those without a slash (the others are part of these), and what is left of
    the step's own seconds."""
    whole, later = "time/step_s", ("time/save_s", "time/export_s")  # those two come after the step was measured
    metrics = run.metrics
    parts = sorted({name for name in metrics.names() if name.startswith("time/") and name.count("/") == 1} - {whole})
    timed = sorted(set().union(*(metrics.columns[name].records for name in (*parts, whole) if name in metrics.columns)))
    if not timed:
        return ""
    seconds = {name: metrics.seconds(name) for name in (*parts, whole)}
    layers = {name: [seconds[name][i] for i in timed] for name in parts}
    within = [sum(seconds[name][i] for name in parts if name not in later) for i in timed]
    rest = [max(0.0, seconds[whole][i] - inside) for i, inside in zip(timed, within, strict=True)]
    layers |= {"time/other_s": rest} if any(rest) else {}
    keys = [f"{name[5:].removesuffix('_s')} {svg.number(sum(layer))} s" for name, layer in layers.items()]
    picture = svg.stacked(f"phases of {run.name}", [metrics.steps[i] for i in timed], list(layers.values()))
    return f"<figure><figcaption>{escape(run.name)}: {legend(keys)}</figcaption>{picture}</figure>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of escaped cells; the first row and the first column are heads."""
    first, *rest = rows
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{text}</td>' for text in row[1:])}</tr>" for row in rest)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{text}</th>" for text in first)}</tr>{body}</table></div>'


def headline(runs: list[Run]) -> str:
    """The last values of the numbers that matter and how it ended, one row per run."""
    found = [name for name in HEADLINE if any(run.last(name) is not None for run in runs)]
    rows = [["run", "step", *map(escape, found), "result"]]
    for run in runs:
        step = run.metrics.steps[-1] if run.metrics.steps else None
        rows.append([escape(run.name), cell(step), *(cell(run.last(name)) for name in found), escape(run.result)])
    return table(rows)


def origins(runs: list[Run]) -> str:
    """Where the runs come from, one column per run."""
    facts = [run.facts() for run in runs]
    rows = [["", *(escape(run.name) for run in runs)]]
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        if name == "seconds":
            name, values = "duration", [None if v is None else duration(v) for v in values]
        if any(value not in (None, "") for value in values):
            rows.append([escape(name), *map(cell, values)])
    return table(rows) if len(rows) > 1 else ""


def differences(runs: list[Run]) -> str:
    """Config keys in which the runs differ, one column per run."""
    settings = [run.settings for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    missing = object()
    differ = [key for key in keys if any(one.get(key, missing) != settings[0].get(key, missing) for one in settings)]
    if not differ:
        return "<p>none</p>"
    rows = [["", *(escape(run.name) for run in runs)]]
    rows += [[escape(key), *("" if key not in one else escape(str(one[key])) for one in settings)] for key in differ]
    return table(rows)


def render(runs: list[Run], summary: dict[str, Any]) -> str:
    """The page. Colours belong to runs, the same in every chart."""
    title = escape(" | ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>", legend([run.name for run in runs]) if len(runs) > 1 else "", headline(runs)]
    parts.append(origins(runs))
    if summary:
        known = [(key, shown(key, value) if number(value) is not None else cell(value)) for key, value in flat(summary)]
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{text}</td></tr>" for key, text in known)
        parts.append(f'<h2>summary</h2><div class="scroll"><table>{rows}</table></div>')
    alarms = [(run.name, alarm.get("text", "")) for run in runs for alarm in run.alarms]
    items = "".join(f'<li class="alarm">{escape(name)}: {escape(str(text))}</li>' for name, text in alarms)
    parts.append(f"<h2>alarms</h2>{f'<ul>{items}</ul>' if items else '<p>none</p>'}")
    if len(runs) > 1:
        parts.append(f"<h2>config that differs</h2>{differences(runs)}")
    parts += [group_of_charts(group, found, runs) for group, found in metric_names(runs).items()]
    if timing := "".join(phases(run) for run in runs):
        parts.append(f'<h2>seconds of a step, by phase</h2><div class="grid-of-charts">{timing}</div>')
    if tables := "".join(sample_tables(run) for run in runs):
        parts.append(f"<h2>samples</h2>{tables}")
    if told := "".join(trajectories(run) for run in runs):
        parts.append(f"<h2>trajectories</h2>{told}")
    for run in runs:
        if run.config:
            parts.append(
                f"<details><summary>config of {escape(run.name)}</summary><pre>{escape(run.config)}</pre></details>"
            )
    # The policy forbids scripts and any loading, should an escape ever be forgotten.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def write_report(given: list[Path]) -> Path:
    """Write report.html into the run folder, or, for several, into the folder they share (else the first one). A folder
    of runs (a sweep) stands for the runs in it. Raises ConfigError where there is no run."""
    folders = run_folders(given)
    runs = [read_run(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
    parents = {folder.resolve().parent for folder in folders}
    where = folders[0] if len(folders) == 1 or len(parents) > 1 else parents.pop()
    where = given[0] if len(given) == 1 else where
    target = where / "report.html"
    page = render(runs, _summary(where / "summary.json"))
    try:
        write_whole(target, page.encode("utf-8", "replace").decode(), durable=False)
    except OSError as cause:
        raise AlignerError(f"report {str(target)!r}: expected a folder that can be written, but {cause}") from cause
    return target


def write_after(given: list[str]) -> None:
    """The page of runs that have ended, as far as there is anything to tell. How a run ended stays as it is, whatever
    may go wrong here."""
    folders = [Path(text) for text in given]
    if not any(is_run(folder) for folder in folders):
        return
    try:
        write_report(folders)
    except (Exception, KeyboardInterrupt) as error:
        print(f"warning: no report.html: {type(error).__name__}: {error}", file=sys.stderr)


def _summary(path: Path) -> dict[str, Any]:
    return read_record(path, AlignerError, nan=True).fields if path.is_file() else {}


def main(folders: list[str]) -> int:
    """`python -m aligner report RUN [RUN ...]`: prints where the page is. Several runs are compared in one page."""
    if not folders:
        print("report: expected one or more run folders", file=sys.stderr)
        return 2
    print(write_report([Path(folder) for folder in folders]))
    return 0
