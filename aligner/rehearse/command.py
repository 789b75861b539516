"""`aligner rehearse`: run ranks of a job that need not be there. Imports no torch: rehearsed ranks are processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.config.freeze import freeze
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.config.validate_model import validate_on_gpu
from aligner.errors import AlignerError, ConfigError
from aligner.plan.devices import Device, find_device
from aligner.rehearse.compare import mismatches
from aligner.rehearse.prepare import prepared
from aligner.rehearse.ranks import chosen, last_stage_peer
from aligner.rehearse.report import Rehearsal, show


class RehearsalError(AlignerError):
    """A rehearsed rank failed, or would wait for another one for ever."""


def main(args: argparse.Namespace, cfg: Config) -> int:
    """Raises ConfigError for what is refused before a run, RehearsalError for what would fail in it."""
    if args.gpus < 1 or args.gpus_per_node < 1:
        raise ConfigError("--gpus", min(args.gpus, args.gpus_per_node), "a number >= 1")
    found = rehearse(cfg, args.gpus, find_device(args.device), args.ranks)
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found.data(), indent=1), encoding="utf-8")
    refuse(found)
    return 0


def refuse(found: Rehearsal) -> None:
    """RehearsalError for the first of its faults."""
    if found.faults:
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        raise RehearsalError(f"the job would fail: {found.faults[0]}{more}")


def rehearse(cfg: Config, gpus: int, device: Device, which: str = "stages") -> Rehearsal:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aligner-rehearse-") as name:
        folder = Path(name)
        ready = prepared(cfg, folder)
        validate(ready, gpus)
        validate_on_gpu(ready, ready.model)
        ranks = chosen(which, ready, gpus)
        shared = {"config": str(freeze(ready, folder)), "tokenizer": ready.model.tokenizer, "gpus": gpus}
        cases = [shared | _case(rank, last_stage_peer(rank, ready, gpus), folder) for rank in ranks]
        records = {record["rank"]: record for record in run(cases, device.name, folder)}
        records = dict(sorted(records.items()))
    return Rehearsal(ready, gpus, device, records, mismatches(records), time.monotonic() - start)


def _case(rank: int, hears: int, folder: Path) -> dict[str, Any]:
    """`hears`: the rank whose objects it is told."""
    return {"rank": rank, "hears": str(folder / f"rank-{hears}.json"), "out": str(folder / f"rank-{rank}.json")}


def run(cases: Sequence[dict[str, Any]], device: str, folder: Path) -> list[dict[str, Any]]:
    """The records of rehearsed ranks; `folder` is for files between processes. Raises AlignerError where one ended
    without a record."""
    processes = min(len(cases), len(os.sched_getaffinity(0)))
    path, log = folder / "cases.json", folder / "processes.log"
    path.write_text(json.dumps({"device": device, "processes": processes, "cases": list(cases)}), encoding="utf-8")
    command = [sys.executable, "-m", "aligner.rehearse.rank", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        for number, line in enumerate(process.stdout, 1):
            told = json.loads(line)
            print(f"rank {told['rank']} rehearsed ({number} of {len(cases)})", file=sys.stderr, flush=True)
    outs = [Path(case["out"]) for case in cases]
    missing = [out for out in outs if not out.is_file()]
    if missing:
        told = missing[0].with_suffix(".log")
        tail = (told if told.is_file() else log).read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RehearsalError(f"the rehearsal of {missing[0].stem} ended without a result: {' '.join(tail)}")
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]
