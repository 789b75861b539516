"""The recipes of conf/experiment as `aligner plan` and `aligner rehearse` have them.

    python -m benchmarks.recipes [--only NAME,...] [--rehearse] [--write]

`--rehearse` takes minutes for each. `--write` writes benchmarks/recipes.md; rows that are not rehearsed now keep what
they have there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aligner.plan.devices import GIB
from aligner.tools.recipes import Recipe, plan_of, recipes

PAGE = Path(__file__).with_suffix(".md")
PLAN, REHEARSED = ("plan step s", "plan GiB"), ("rehearsed GiB", "rehearsed update s", "faults")
HEAD = ("recipe", "GPUs", *PLAN, *REHEARSED)


def page_rows() -> dict[str, dict[str, str]]:
    """Return the page's rows by recipe."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): dict(zip(HEAD, row, strict=True)) for row in rows}


def planned(recipe: Recipe) -> dict[str, str]:
    cfg = recipe.config
    plan = plan_of(cfg, recipe.device)
    gib = f"{plan.memory.peak_bytes / GIB:.1f} in {plan.memory.peak}{'' if plan.memory.fits else ', too much'}"
    return {
        "recipe": f"`{recipe.name}`",
        "GPUs": f"{cfg.cluster.gpus} {recipe.device.upper()}",
        PLAN[0]: f"{plan.step_s:.1f}",
        PLAN[1]: gib,
    }


def rehearsed(recipe: Recipe) -> dict[str, str]:
    """Rehearse the first rank and the first of the last pipeline stage."""
    cfg = recipe.config
    last = cfg.cluster.gpus - cfg.cluster.gpus // cfg.parallel.pipeline
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ranks = f"0,{last}" if last else "0"
        command = [sys.executable, "-m", "aligner", "rehearse", "--json", str(report), "--ranks", ranks]
        done = subprocess.run([*command, *recipe.arguments], capture_output=True, text=True, check=False)
        if not report.exists():
            return {REHEARSED[0]: done.stderr.strip().splitlines()[-1]}
        data = json.loads(report.read_text())
    phases = [phase["peak_bytes"] for rank in data["ranks"].values() for phase in rank["phases"].values()]
    faults = str(len(data["faults"]))
    return dict(zip(REHEARSED, (f"{max(phases) / GIB:.1f}", f"{data['update_s']:.1f}", faults), strict=True))


def line(cells: dict[str, str]) -> str:
    return f"| {' | '.join(cells.get(name, '') for name in HEAD)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    before, lines = page_rows(), []
    for name, recipe in recipes().items():
        cells = {cell: before.get(name, {}).get(cell, "") for cell in REHEARSED} | planned(recipe)
        if options.rehearse and name in (options.only.split(",") if options.only else [name]):
            start = time.monotonic()
            cells |= rehearsed(recipe)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        lines.append(line(cells))
        print(lines[-1], flush=True)
    if options.write:
        begin = PAGE.read_text(encoding="utf-8").partition("| recipe")[0]
        PAGE.write_text("\n".join([begin + f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
