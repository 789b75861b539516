"""`aligner shakedown`: climb the rungs, note each result, and write one report of all.

A rung that has passed, with the same version and overrides, is not climbed again.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.files import write_whole
from aligner.shakedown.jobs import CheckedMachine, RungError
from aligner.shakedown.rungs import RUNGS
from aligner.version import VERSION

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
DEFAULT_FOLDER = "runs/shakedown"
CPU_RANKS = 2


def main(args: argparse.Namespace) -> int:
    """Return 1 if a rung failed, else 0."""
    folders = [text for text in args.overrides if "=" not in text]
    overrides = tuple(text for text in args.overrides if "=" in text)
    names = args.only.split(",") if args.only else list(RUNGS)
    for name in names:
        if name not in RUNGS:
            raise ConfigError("--only", name, "rungs of " + ", ".join(RUNGS))
    if len(folders) > 1:
        raise ConfigError("FOLDER", folders[1], "one folder")
    gpus = 0 if args.cpu else _gpus()
    machine = CheckedMachine(
        Path(folders[0] if folders else DEFAULT_FOLDER).absolute(),
        gpus,
        ranks=gpus or CPU_RANKS,
        overrides=overrides,
        nodes=int(os.environ.get("SLURM_NNODES", 1)),
        weights=args.weights,
        rows=args.rows,
        band=_band(args.band),
    )
    machine.data.make()
    print(f"{len(names)} rungs on {_device(machine)}; jobs and their logs: {machine.folder / 'jobs'}", flush=True)
    failed = False
    for number, name in enumerate(names, 1):
        print(f"{number}/{len(names)} {name}: {RUNGS[name].proves}", flush=True)
        result = climb(machine, name, args.again)
        print(f"    {result['outcome']}{_seconds(result)}{': ' * bool(result['why'])}{result['why']}", flush=True)
        failed |= result["outcome"] == FAILED
    results = [result for name in RUNGS if (result := _noted(machine, name))]
    target = write_report(machine.folder, results)
    print(f"report: {target}, {target.with_suffix('.json')}")
    return int(failed)


def _band(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ConfigError("--band", text, "two numbers: 0.65,0.85") from None
    return low, high


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("shakedown", "no CUDA device", "a machine with a GPU", "--cpu tries the jobs without one.")
    return torch.cuda.device_count()


def _device(machine: CheckedMachine) -> str:
    nodes = f"{machine.nodes} nodes with " if machine.nodes > 1 else ""
    gpus = (
        f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}" if machine.gpus else "the CPU, which shows nothing about GPUs"
    )
    return nodes + gpus


def _of(result: dict[str, Any]) -> str:
    asked = result["asked"]
    return f"{asked['device']}; {result['date']}; {asked['version']} {' '.join(asked['overrides'])}"


def _seconds(result: dict[str, Any]) -> str:
    return f" ({result['seconds']:.0f} s)" if result["seconds"] else ""


def climb(machine: CheckedMachine, name: str, again: bool = False) -> dict[str, Any]:
    """Return the rung's result: an earlier one that passed, or a new one, which is noted."""
    rung, asked = RUNGS[name], {"version": VERSION, "device": _device(machine), "overrides": list(machine.overrides)}
    if name == "published":
        asked["published"] = [machine.weights, machine.rows, *machine.band]
    before = _noted(machine, name)
    if before and before["outcome"] == PASSED and before["asked"] == asked and not again:
        return before | {"why": "earlier"}
    result = {"rung": name, "proves": rung.proves, "asked": asked, "outcome": LEFT_OUT, "measured": {}, "seconds": 0.0}
    if why := rung.needs(machine):
        result |= {"why": why}
    else:
        start = time.monotonic()
        try:
            result |= {"outcome": PASSED, "measured": rung.climb(machine), "why": ""}
        except RungError as error:
            result |= {"outcome": FAILED, "why": str(error)}
        except Exception as error:  # the report says so, and the other rungs are climbed
            result |= {"outcome": FAILED, "why": "".join(traceback.format_exception(error))}
        result["seconds"] = time.monotonic() - start
    result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    (machine.folder / "rungs").mkdir(exist_ok=True)
    write_whole(machine.folder / "rungs" / f"{name}.json", json.dumps(result, indent=1))
    return result


def _noted(machine: CheckedMachine, name: str) -> dict[str, Any]:
    path = machine.folder / "rungs" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_report(folder: Path, results: list[dict[str, Any]]) -> Path:
    """Write report.json, with a hash of its results, and report.html; return the latter's path."""
    text = json.dumps(results, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_whole(folder / "report.json", json.dumps({"sha256": digest, "results": results}, indent=1))
    rows = "".join(
        f"<tr class='{result['outcome'].replace(' ', '-')}'><td>{result['rung']}<td>{html.escape(result['proves'])}"
        f"<td>{result['outcome']}<td>{result['seconds']:.0f}"
        f"<td>{html.escape(_of(result))}<td><pre>{html.escape(result['why'])}</pre>"
        "<details><summary>measured</summary>"
        f"<pre>{html.escape(json.dumps(result['measured'], indent=1))}</pre></details>"
        for result in results
    )
    page = (
        "<!doctype html><meta charset=utf-8><title>aligner shakedown</title><style>"
        "body{font:15px sans-serif;margin:2em}.passed td:nth-child(3){color:#070}.failed td:nth-child(3){color:#b00}"
        "td,th{padding:.4em;text-align:left;vertical-align:top;border-top:1px solid #ccc}</style>"
        f"<h1>aligner {VERSION}, shakedown</h1><p>SHA-256 of the results: <code>{digest}</code>. If a rung failed, "
        "send this page, <code>report.json</code> and the logs of the jobs that it names.</p>"
        f"<table><tr><th>rung<th>what it proves<th>outcome<th>seconds<th>of<th>why, and figures{rows}</table>\n"
    )
    write_whole(folder / "report.html", page)
    return folder / "report.html"
