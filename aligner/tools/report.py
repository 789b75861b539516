"""report.html: one self-contained page of curves, samples, alarms and config of one run, or of several side by side.

Everything a model or a dataset wrote is escaped, the page loads nothing and runs no script; it opens on a phone.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.run.metrics import read_jsonl
from aligner.tools import svg

GROUPS = ("eval", "reward", "sft", "rm", "response", "policy", "kl", "critic", "advantage", "mismatch", "staleness")
LATE_GROUPS = ("throughput", "refit", "batch", "memory", "time")
HEADLINE = (
    "eval/accuracy",
    "eval/loss",
    "reward/mean",
    "sft/loss",
    "rm/loss",
    "rm/accuracy",
    "kl/ref_k3",
    "policy/entropy",
)
SAMPLE_STEPS = 5  # the last tables shown of each run

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
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .8em}.alarm{color:var(--warn)}
"""


@dataclass
class Run:
    """What a run folder holds, as far as the report goes."""

    name: str
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""

    def curve(self, name: str) -> list[tuple[float, float | None]]:
        return [(record["step"], record[name]) for record in self.metrics if name in record]

    def last(self, name: str) -> float | None:
        return next((record[name] for record in reversed(self.metrics) if record.get(name) is not None), None)


def read_run(folder: Path) -> Run:
    """Raises AlignerError if the folder has no metrics.jsonl."""
    if not (folder / "metrics.jsonl").is_file():
        raise AlignerError(f"report {str(folder)!r}: expected a run folder (run.dir) that contains metrics.jsonl")
    config = folder / "config.yaml"
    return Run(
        name=folder.resolve().name,
        metrics=read_jsonl(folder / "metrics.jsonl"),
        samples=read_jsonl(folder / "samples.jsonl"),
        alarms=read_jsonl(folder / "alarms.jsonl"),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def metric_names(runs: list[Run]) -> dict[str, list[str]]:
    """group -> its metrics, in the order the report shows them."""
    names = {n for run in runs for record in run.metrics for n in record if n not in ("step", "wall_time")}
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(name.split("/")[0], []).append(name)
    others = sorted(set(found) - set(GROUPS) - set(LATE_GROUPS))
    return {group: found[group] for group in (*GROUPS, *others, *LATE_GROUPS) if group in found}


def legend(names: list[str]) -> str:
    keys = (f'<span class="key" style="background:{svg.color(i)}"></span>{escape(n)}' for i, n in enumerate(names))
    return f"<p>{''.join(keys)}</p>"


def chart(name: str, runs: list[Run]) -> str:
    picture = svg.lines(name, [(i, run.curve(name)) for i, run in enumerate(runs)])
    if not picture:
        return ""
    last = ", ".join(svg.number(v) for v in (run.last(name) for run in runs) if v is not None)
    return f"<figure><figcaption><b>{escape(name)}</b> {last}</figcaption>{picture}</figure>"


def phases(run: Run) -> str:
    """Seconds of each step, stacked by phase. Only phases without a slash: the others are part of these."""
    names = sorted({n for record in run.metrics for n in record if n.startswith("time/") and n.count("/") == 1})
    if not names:
        return ""
    xs = [record["step"] for record in run.metrics]
    layers = [[record.get(name) or 0.0 for record in run.metrics] for name in names]
    shown = [
        f"{name[5:].removesuffix('_s')} {svg.number(sum(layer))} s" for name, layer in zip(names, layers, strict=True)
    ]
    picture = svg.stacked(f"phases of {run.name}", xs, layers)
    return f"<figure><figcaption>{escape(run.name)}: {legend(shown)}</figcaption>{picture}</figure>"


def sample_tables(run: Run) -> str:
    steps = sorted({row["step"] for row in run.samples})[-SAMPLE_STEPS:]
    parts = []
    for step in reversed(steps):
        rows = [row for row in run.samples if row["step"] == step]
        body = "".join(
            f'<tr><td class="text">{escape(str(row["prompt"]))}</td>'
            f'<td class="text">{escape(str(row["response"]))}</td>'
            f"<td>{cell(row['reward'])}</td><td>{cell(row['advantage'])}</td>"
            f"<td>{'stop' if row['finished'] else 'limit'}</td></tr>"
            for row in rows
        )
        head = "<tr><th>prompt</th><th>response</th><th>reward</th><th>advantage</th><th>end</th></tr>"
        state = " open" if step == steps[-1] else ""
        parts.append(
            f"<details{state}><summary>{escape(run.name)}, step {cell(step)}</summary>"
            f'<div class="scroll"><table>{head}{body}</table></div></details>'
        )
    return "".join(parts)


def cell(value: Any) -> str:
    if isinstance(value, float):
        return svg.number(value)
    return "" if value is None else escape(str(value))


def headline(runs: list[Run]) -> str:
    """The last values of the numbers that matter, one row per run."""
    names = [name for name in HEADLINE if any(run.last(name) is not None for run in runs)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{escape(run.name)}</th><td>{cell(run.metrics[-1]['step'] if run.metrics else None)}</td>"
        + "".join(f"<td>{cell(run.last(name))}</td>" for name in names)
        + "</tr>"
        for run in runs
    )
    return f'<div class="scroll"><table><tr><th>run</th><th>step</th>{head}</tr>{rows}</table></div>'


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]


def render(runs: list[Run], summary: dict[str, Any]) -> str:
    """The page. Colours belong to runs, the same in every chart."""
    title = escape(" | ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>", legend([run.name for run in runs]) if len(runs) > 1 else "", headline(runs)]
    if summary:
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{cell(value)}</td></tr>" for key, value in flat(summary))
        parts.append(f'<h2>summary</h2><div class="scroll"><table>{rows}</table></div>')
    alarms = [(run.name, alarm["text"]) for run in runs for alarm in run.alarms]
    items = "".join(f'<li class="alarm">{escape(name)}: {escape(str(text))}</li>' for name, text in alarms)
    parts.append(f"<h2>alarms</h2>{f'<ul>{items}</ul>' if items else '<p>none</p>'}")
    for group, names in metric_names(runs).items():
        if charts := "".join(chart(name, runs) for name in names):
            parts.append(f'<h2>{escape(group)}</h2><div class="grid-of-charts">{charts}</div>')
    if timing := "".join(phases(run) for run in runs):
        parts.append(f'<h2>seconds of a step, by phase</h2><div class="grid-of-charts">{timing}</div>')
    if tables := "".join(sample_tables(run) for run in runs):
        parts.append(f"<h2>samples</h2>{tables}")
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


def write_report(folders: list[Path]) -> Path:
    """Write report.html into the run folder, or, for several, into the folder they share (else the first one)."""
    runs = [read_run(folder) for folder in folders]
    parents = {folder.resolve().parent for folder in folders}
    where = folders[0] if len(folders) == 1 or len(parents) > 1 else parents.pop()
    summary = where / "summary.json"
    target = where / "report.html"
    page = render(runs, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {})
    aside = target.with_suffix(".aside")
    try:
        aside.write_text(page, encoding="utf-8")
        os.replace(aside, target)
    except OSError as cause:
        raise AlignerError(f"report {str(target)!r}: expected a folder that can be written, but {cause}") from cause
    return target


def main(folders: list[str]) -> int:
    """`python -m aligner report RUN [RUN ...]`: prints where the page is. Several runs are compared in one page."""
    if not folders:
        print("report: expected one or more run folders", file=sys.stderr)
        return 2
    print(write_report([Path(folder) for folder in folders]))
    return 0
