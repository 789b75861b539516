"""`aligner check layouts`: compare loss and gradients of every layout with one rank's.

A tiny model of the same family has the run's options, and functions of the user's own are checked
first. Its ranks are processes on this machine, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aligner.algorithms.outside import check as check_functions
from aligner.cluster import fork_server
from aligner.cluster.launch import STOPS, launch
from aligner.config.checks import exists
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.errors import LayoutError
from aligner.roles.shape_check import with_real_shape
from aligner.tools.layouts.cases import LayoutCase, cases_of, distances, tolerances
from aligner.tools.layouts.ranks import JOBS, LayoutJob
from aligner.tools.layouts.replay import kinds_of
from aligner.tools.layouts.tiny import tiny_model

RANKS = "aligner.tools.layouts.ranks"
ONE = "one rank"
MEASURES = ("loss", "norm")  # what else a table has are gradients
WIDTH = 200  # of a table that is not shown on a terminal


def main(args: argparse.Namespace, cfg: Config) -> int:
    """Print a table for each loss of the stage. Return 1 if a number is past its tolerance or ranks failed, else 0."""
    if cfg.model.init != "random":
        exists("model.init", cfg.model.init)
    for note in check_functions(cfg.algorithm) if cfg.algorithm.own_functions() else ():
        print(note, flush=True)
    model = tiny_model(with_real_shape(cfg).model)
    cases, refused = cases_of(cfg, model)
    if len(cases) == 1:  # micro-batches alone
        raise LayoutError("model", model.family, "a model that can be on several ranks", next(iter(refused.values())))
    print(f"{model.family} with {model.num_layers} layers in float32, stage {cfg.stage.name}, on this CPU", flush=True)
    tables = {kind: compared(results) for kind, results in compute(cfg, cases).items()}
    wrong = [f"{kind}: {text}" for kind, table in tables.items() for text in faults(table, cases, model)]
    for kind, table in tables.items():
        show(kind, table, cases, model)
    for name, why in refused.items():
        print(f"left out: {name}: {why}")
    if args.json:
        Path(args.json).write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    for text in wrong:
        print(f"FAULT {text}")
    print(f"{len(wrong)} faults" if wrong else "passed: loss and gradients do not depend on the layout")
    return int(bool(wrong))


def compute(cfg: Config, cases: Mapping[str, LayoutCase]) -> dict[str, dict[str, Any]]:
    """Return kind of loss -> name of a case, or ONE -> result; None if its ranks failed."""
    kinds, algorithm = kinds_of(cfg), cfg.algorithm
    temperature = cfg.sampling.temperature if cfg.stage.its.rollouts else 1.0
    some = next(iter(cases.values()))
    everything = {ONE: LayoutCase(model=some.model), **cases}
    jobs = {
        (kind, name): LayoutJob(case, kind, algorithm, temperature, f"{kind}-{number}.pt")
        for kind in kinds
        for number, (name, case) in enumerate(everything.items())
    }
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="aligner-check-") as path:
        folder = Path(path)
        (folder / JOBS).write_bytes(pickle.dumps(list(jobs.values())))
        command = [sys.executable, "-m", RANKS, path]
        imports = ["aligner.tools.layouts.replay"]
        with fork_server.kept(imports, {**os.environ, "OMP_NUM_THREADS": "1"}, STOPS):
            for world in sorted({case.world for case in everything.values()}):
                launch(folder, world, folder / str(world), threads=1, argv=command, imports=imports)
        files = {key: folder / job.file for key, job in jobs.items()}
        results = {key: torch.load(file) if file.exists() else None for key, file in files.items()}
    return {kind: {name: results[kind, name] for name in everything} for kind in kinds}


def compared(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return name of a case -> measure or tensor -> how far it is from one rank; infinitely where there is none."""
    base = results[ONE]
    names = [*MEASURES, *(base["gradient"] if base else ())]
    lost = dict.fromkeys(names, math.inf)
    return {
        name: distances(result, base) if base and result else lost for name, result in results.items() if name != ONE
    }


def bound_of(measure: str, bounds: Mapping[str, float]) -> float:
    return bounds[measure if measure in MEASURES else "gradient"]


def faults(table: Mapping[str, Mapping[str, float]], cases: Mapping[str, LayoutCase], model: ModelConfig) -> list[str]:
    """Return a line for each case with numbers past their tolerances: how many, and the worst."""
    lines = []
    for name, row in table.items():
        bounds = tolerances(cases[name], model)
        past = {measure: x / bound_of(measure, bounds) for measure, x in row.items()}
        past = {measure: ratio for measure, ratio in past.items() if not ratio <= 1}
        if past:
            worst = max(past, key=lambda measure: past[measure])
            shown = f"{worst} {row[worst]:.1e}, tolerance {bound_of(worst, bounds):.0e}"
            lines.append(f"{name}: {len(past)} of {len(row)} numbers; {shown}")
    return lines


def show(
    kind: str, table: Mapping[str, Mapping[str, float]], cases: Mapping[str, LayoutCase], model: ModelConfig
) -> None:
    """Print a column for each case, and a row for each tensor, of which layers and experts share one."""
    columns = [f"{name}\n{cases[name].world} ranks" for name in table]
    shown = Table("distance from one rank", *columns, title=kind, caption="!: past the tolerance")
    rows: dict[str, list[str]] = {}
    for measure in next(iter(table.values())):
        rows.setdefault(re.sub(r"\.\d+\.", ".*.", measure), []).append(measure)
    for label, measures in rows.items():
        cells = []
        for name, row in table.items():
            worst, bound = max(row[m] for m in measures), bound_of(measures[0], tolerances(cases[name], model))
            cells.append(f"{worst:.0e}{'' if worst <= bound else ' !'}")
        shown.add_row({"norm": "gradient norm"}.get(label, label), *cells, end_section=label == MEASURES[-1])
    shown.add_section()
    shown.add_row("tolerance of gradients", *(f"{tolerances(cases[name], model)['gradient']:.0e}" for name in table))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(shown)
