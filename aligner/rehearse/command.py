"""`aligner rehearse`: run ranks of a job that need not be there. Imports no torch: rehearsed ranks are processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aligner.config.freeze import freeze
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.config.validate_model import validate_on_gpu
from aligner.errors import AlignerError, ConfigError
from aligner.plan.devices import DEVICES, Device, find_device
from aligner.plan.sizing import Room, sized
from aligner.processes import guarded
from aligner.rehearse.prepare import prepared
from aligner.rehearse.progress import Progress, follow
from aligner.rehearse.ranks import chosen, heard_by
from aligner.rehearse.report import Rehearsal, show

PROGRAM = "aligner.rehearse.rank"  # runs the cases of `run`


class RehearsalError(AlignerError):
    """A rehearsed rank failed, or would wait for another one for ever."""


def main(args: argparse.Namespace, cfg: Config) -> int:
    """Raises ConfigError for what is refused before a run, RehearsalError for what would fail in it."""
    if args.gpus < 1:
        raise ConfigError("--gpus", args.gpus, "a number >= 1")
    found = rehearse(cfg, args.gpus, find_device(args.device), args.ranks)
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found.data(), indent=1), encoding="utf-8")
    refuse(found)
    return 0


def check(cfg: Config, gpus: int, gpu: str) -> None:
    """For `submit`, whose own output programs read. Raises as `main`."""
    refuse(rehearse(cfg, gpus, find_device(gpu, "gpu")))


def refuse(found: Rehearsal) -> None:
    """RehearsalError for the first of its faults."""
    if found.faults:
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        raise RehearsalError(f"the job would fail: {found.faults[0]}{more}")


def rehearse(cfg: Config, gpus: int, device: Device, which: str = "stages") -> Rehearsal:
    start = time.monotonic()
    with _ended_tidily(), tempfile.TemporaryDirectory(prefix="aligner-rehearse-") as name:
        ready, cases = cases_of(cfg, gpus, which, Path(name) / "job", device)
        records = {record["rank"]: record for record in run(cases, device.name, Path(name))}
    return Rehearsal(ready, gpus, device, dict(sorted(records.items())), time.monotonic() - start)


@contextmanager
def _ended_tidily() -> Iterator[None]:
    """What a signal would end at once ends as an exit does, so that no temporary folder is left."""
    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, lambda number, frame: sys.exit(128 + number)) for number in mine}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cases_of(
    cfg: Config, gpus: int, which: str, folder: Path, device: Device = DEVICES["h100"]
) -> tuple[Config, list[dict[str, Any]]]:
    """The config as it is rehearsed, and for `run` each rank that is, with its files in a new `folder`. Raises
    ConfigError."""
    ready = prepared(sized(cfg, gpus, Room.of(device)), folder)
    validate(ready, gpus)
    validate_on_gpu(ready, ready.model)
    shared = {"config": str(freeze(ready, folder)), "tokenizer": ready.model.tokenizer, "gpus": gpus}
    out = lambda rank: str(folder / f"rank-{rank}.json")  # noqa: E731
    found = []
    for rank in chosen(which, ready, gpus):
        hears = heard_by(rank, ready, gpus)
        found.append(shared | {"rank": rank, "out": out(rank), "hears": hears, "speaker": out(hears)})
    return ready, found


def run(cases: Sequence[dict[str, Any]], device: str, folder: Path) -> list[dict[str, Any]]:
    """The records of rehearsed ranks; `folder` is for files between processes, which end with this one. Raises
    RehearsalError where they cannot run at all."""
    processes = min(len(cases), len(os.sched_getaffinity(0)))
    path, log = folder / "cases.json", folder / "processes.log"
    path.write_text(json.dumps({"device": device, "processes": processes, "cases": list(cases)}), encoding="utf-8")
    command = guarded([sys.executable, "-m", PROGRAM, str(path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as guard,
    ):
        assert guard.stdout is not None
        try:
            follow(guard.stdout.fileno(), Progress(len(cases), sys.stderr))
        finally:
            guard.terminate()  # what still runs, where this process is interrupted
    outs = [Path(case["out"]) for case in cases]
    if not all(out.is_file() for out in outs):
        told = " ".join(log.read_text(encoding="utf-8").strip().splitlines()[-1:])
        raise RehearsalError(f"the processes of the rehearsal ended without a result: {told}")
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]
