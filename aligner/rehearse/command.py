"""`aligner rehearse`: run ranks of a job without its GPUs. Imports no torch: rehearsed ranks are separate processes."""

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
from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.config.validate_model import validate_on_gpu
from aligner.errors import AlignerError, ConfigError
from aligner.plan.devices import DEVICES, Device, find_device
from aligner.plan.sizing import Room, sized
from aligner.processes import guarded
from aligner.rehearse.options import GPUS_PER_NODE
from aligner.rehearse.prepare import prepared
from aligner.rehearse.progress import Progress, follow
from aligner.rehearse.ranks import chosen, source_of
from aligner.rehearse.report import Rehearsal, show

PROGRAM = "aligner.rehearse.rank"  # runs the cases of `run`


class RehearsalError(AlignerError):
    """A failure of a rehearsed rank, or a wait for another one that never ends."""


def main(args: argparse.Namespace, cfg: Config) -> int:
    """Run `aligner rehearse`. Raises ConfigError for a config that is refused before a run, RehearsalError for faults
    in it."""
    for key in ("gpus", "gpus_per_node"):
        if getattr(args, key) < 1:
            raise ConfigError(f"--{key.replace('_', '-')}", getattr(args, key), "a number >= 1")
    rehearsal = rehearse(cfg, args.gpus, find_device(args.device), args.ranks, args.gpus_per_node)
    show(rehearsal)
    if args.json:
        Path(args.json).write_text(json.dumps(rehearsal.data(), indent=1), encoding="utf-8")
    refuse(rehearsal)
    return 0


def check(cfg: Config, gpus: int, gpu: str) -> None:
    """Rehearse for `submit`, whose own output is read by programs. Raises like `main`."""
    refuse(rehearse(cfg, gpus, find_device(gpu, "gpu")))


def refuse(rehearsal: Rehearsal) -> None:
    """Raise RehearsalError for the first fault."""
    if rehearsal.faults:
        others = f" (and {len(rehearsal.faults) - 1} more)" if len(rehearsal.faults) > 1 else ""
        raise RehearsalError(f"the job would fail: {rehearsal.faults[0]}{others}")


def rehearse(
    cfg: Config, gpus: int, device: Device, which: str = "stages", gpus_per_node: int = GPUS_PER_NODE
) -> Rehearsal:
    start = time.monotonic()
    with _ended_tidily(), tempfile.TemporaryDirectory(prefix="aligner-rehearse-") as name:
        ready, cases = cases_of(cfg, gpus, which, Path(name) / "job", device)
        records = {record["rank"]: record for record in run(cases, device.name, Path(name), gpus_per_node)}
    return Rehearsal(ready, gpus, device, dict(sorted(records.items())), time.monotonic() - start)


@contextmanager
def _ended_tidily() -> Iterator[None]:
    """Turn ending signals into exits, so that no temporary folder is left."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, lambda number, frame: sys.exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cases_of(
    cfg: Config, gpus: int, which: str, folder: Path, device: Device = DEVICES["h100"]
) -> tuple[Config, list[dict[str, Any]]]:
    """Return the config as it is rehearsed, and a case for each rank to `run`, with its files in a new `folder`. Raises
    ConfigError."""
    RuleContext(cfg, gpus).check("ranks", "batch")  # by whose numbers `sized` divides
    ready = prepared(sized(cfg, gpus, Room.of(device)), folder)
    validate(ready, gpus)
    validate_on_gpu(ready, ready.model)
    shared = {"config": str(freeze(ready, folder)), "tokenizer": ready.model.tokenizer, "gpus": gpus}
    out = lambda rank: str(folder / f"rank-{rank}.json")  # noqa: E731
    cases = []
    for rank in chosen(which, ready, gpus):
        source = source_of(rank, ready, gpus)
        cases.append(shared | {"rank": rank, "out": out(rank), "source": source, "source_record": out(source)})
    return ready, cases


def run(
    cases: Sequence[dict[str, Any]], device: str, folder: Path, gpus_per_node: int = GPUS_PER_NODE
) -> list[dict[str, Any]]:
    """Return the records of rehearsed ranks. `folder` is for files between processes, which end with this one. Raises
    RehearsalError if they cannot run at all."""
    processes = min(len(cases), len(os.sched_getaffinity(0)))
    path, log = folder / "cases.json", folder / "processes.log"
    asked = {"device": device, "gpus_per_node": gpus_per_node, "processes": processes, "cases": list(cases)}
    path.write_text(json.dumps(asked), encoding="utf-8")
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
            guard.terminate()  # processes that still run, if this one is interrupted
    outs = [Path(case["out"]) for case in cases]
    if not all(out.is_file() for out in outs):
        last = " ".join(log.read_text(encoding="utf-8").strip().splitlines()[-1:])
        raise RehearsalError(f"the processes of the rehearsal ended without a result: {last}")
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]
