"""Is every node of a job fit for it? Asked before the ranks start: `--check` on each node, then `--collect` once.

Standard library only, of Python 3.7 or later, since it runs with the host's outside of containers; torch for
`--all-reduce` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aligner.errors import AlignerError
from aligner.foreign import read_record

VISIBLE_WITHIN_S = 15.0  # what a network file system may take to show a new file
MIN_FREE_BYTES = 1 << 30
MAX_SKEW_S = 60.0  # NCCL and TLS do not care; file times and logs do


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check(folder: Path, min_free_bytes: int = MIN_FREE_BYTES) -> dict:
    """This node's report; written to folder/<node>.json if the folder can be seen."""
    problems = []
    if not _visible(folder / "token"):
        problems.append(f"{folder} is not the same folder here: what the first node wrote cannot be read")
    # the scratch folder need not exist yet
    scratch = Path(os.environ.get("ALIGNER_SCRATCH") or tempfile.gettempdir())
    for place in (folder, scratch):
        free = _free_bytes(place)
        if free is not None and free < min_free_bytes:
            problems.append(f"{place}: {free / 2**20:.0f} MiB free, {min_free_bytes / 2**20:.0f} MiB are needed")
    problems += _gpus()
    report = {"node": node_name(), "time_s": time.time(), "problems": problems}
    try:
        aside = folder / f".{node_name()}"
        aside.write_text(json.dumps(report), encoding="utf-8")
        aside.rename(folder / f"{node_name()}.json")
    except OSError as error:
        report["problems"].append(f"{folder}: cannot be written: {error.strerror}")
    return report


def _visible(token: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not token.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _free_bytes(place: Path) -> int | None:
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free if place.exists() else None


def _gpus() -> list[str]:
    """Fewer GPUs than Slurm gave, or memory errors that will not go away."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdecimal() or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi does not answer: {error}"]
    found = [] if len(lines) >= int(given) else [f"{len(lines)} GPUs, Slurm gave {given}"]
    for line in lines:
        index, _, errors = line.partition(", ")
        if errors.isdecimal() and int(errors):
            found.append(f"GPU {index} has {errors} uncorrected memory errors")
    return found


def collect(folder: Path, nodes: list[str], max_skew_s: float = MAX_SKEW_S) -> dict[str, list[str]]:
    """Bad node -> why. Empty if nothing reported at all: then the check could not run, which says nothing of nodes."""
    reports = {}
    for node in nodes:
        with contextlib.suppress(AlignerError):  # none, or none that is whole: told below
            said = read_record(folder / f"{node}.json", AlignerError)
            reports[node] = {"time_s": said.number("time_s"), "problems": said.texts("problems")}
    if not reports:
        return {}
    middle = statistics.median(report["time_s"] for report in reports.values())
    bad = {
        node: ["no report: it does not answer, or does not see the run folder"] for node in set(nodes) - set(reports)
    }
    for node, report in reports.items():
        problems = list(report["problems"])
        skew = report["time_s"] - middle
        if abs(skew) > max_skew_s:
            problems.append(f"its clock is {skew:+.0f} s from the others'")
        if problems:
            bad[node] = problems
    return dict(sorted(bad.items()))


def all_reduce(megabytes: int = 64, timeout_s: float = 120.0) -> int:
    """A sum over all ranks by NCCL, or gloo without GPUs; 0 if it is right. Ranks as in training."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from aligner.cluster.env import rank_env

    env = rank_env()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = env.master_addr, str(env.master_port)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=env.rank, world_size=env.world_size, timeout=timedelta(seconds=timeout_s)
    )
    numbers = torch.full((megabytes * 2**18,), float(env.rank + 1), device=device)
    started = time.monotonic()
    dist.all_reduce(numbers)
    wrong = int((numbers != env.world_size * (env.world_size + 1) / 2).sum())
    seconds = time.monotonic() - started
    print(f"{node_name()} rank {env.rank}: {megabytes} MB in {seconds:.2f} s, {wrong} wrong", flush=True)
    dist.destroy_process_group()
    return int(wrong > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aligner.cluster.health", description=__doc__)
    parser.add_argument("--check", metavar="FOLDER", help="on each node: write a report into the folder")
    parser.add_argument("--collect", nargs="+", metavar="FOLDER NODE", help="read them; print the names of bad nodes")
    parser.add_argument("--all-reduce", action="store_true", help="as ranks: check a sum over all of them")
    args = parser.parse_args(argv)
    if args.all_reduce:
        return all_reduce()
    if args.check:
        report = check(Path(args.check))
        print(f"{report['node']}: {'; '.join(report['problems']) or 'fit'}")
        return 0
    if not args.collect:
        parser.error("one of --check, --collect, --all-reduce is needed")
    folder, nodes = Path(args.collect[0]), args.collect[1:]
    bad = collect(folder, nodes)
    for node, problems in bad.items():
        print(node)
        print(f"aligner: node {node} is unfit: {'; '.join(problems)}", file=sys.stderr)
    if not bad and not any((folder / f"{node}.json").exists() for node in nodes):
        print(f"aligner: the health check did not run; see {folder / 'srun.log'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
