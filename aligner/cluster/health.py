"""Health check of a job's nodes before the ranks start: `--check` on each node, then `--collect` once.

Standard library only, of Python 3.7 or later, since it runs with the host's outside of containers; torch only for
`--all-reduce`.
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

VISIBLE_WITHIN_S = 15.0  # time that a network file system may take to show a new file
MIN_FREE_BYTES = 1 << 30
REPEATS = 5  # of a sum whose seconds are measured
MAX_SKEW_S = 60.0  # NCCL and TLS do not care; file times and logs do


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check(folder: Path, min_free_bytes: int = MIN_FREE_BYTES) -> dict:
    """Return this node's report, and write it to folder/<node>.json if the folder is visible."""
    problems = []
    if not _visible(folder / "token"):
        problems.append(f"{folder} is not the same folder here: what the first node wrote cannot be read")
    # the scratch folder need not exist yet
    scratch = Path(os.environ.get("ALIGNER_SCRATCH") or tempfile.gettempdir())
    for path in (folder, scratch):
        free = _free_bytes(path)
        if free is not None and free < min_free_bytes:
            problems.append(f"{path}: {free / 2**20:.0f} MiB free, {min_free_bytes / 2**20:.0f} MiB are needed")
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


def _free_bytes(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free if path.exists() else None


def _gpus() -> list[str]:
    """Return problems of GPUs: fewer than Slurm allocated, or permanent memory errors."""
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not expected.isdecimal() or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi does not answer: {error}"]
    problems = [] if len(lines) >= int(expected) else [f"{len(lines)} GPUs, Slurm gave {expected}"]
    for line in lines:
        index, _, errors = line.partition(", ")
        if errors.isdecimal() and int(errors):
            problems.append(f"GPU {index} has {errors} uncorrected memory errors")
    return problems


def collect(folder: Path, nodes: list[str], max_skew_s: float = MAX_SKEW_S) -> dict[str, list[str]]:
    """Return bad node -> problems. Empty if no node reported: then the check could not run, which is no fault of
    nodes."""
    reports = {}
    for node in nodes:
        with contextlib.suppress(AlignerError):  # none, or none that is complete: reported below
            fields = read_record(folder / f"{node}.json", AlignerError)
            reports[node] = {"time_s": fields.number("time_s"), "problems": fields.texts("problems")}
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


def all_reduce(megabytes: int = 0, timeout_s: float = 120.0) -> int:
    """Sum over all ranks by NCCL, or gloo without GPUs; return 0 if it is right. Ranks as in training. Printed is the
    rate at which a rank's links carry a sum: 2 (n - 1) / n of the bytes, over the median of the seconds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from aligner.cluster.env import rank_env

    env = rank_env()
    cuda = torch.cuda.is_available()
    megabytes = megabytes or (1024 if cuda else 16)
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = env.master_addr, str(env.master_port)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=env.rank, world_size=env.world_size, timeout=timedelta(seconds=timeout_s)
    )
    numbers = torch.full((megabytes * 2**18,), float(env.rank + 1), device=device)
    dist.all_reduce(numbers)
    wrong = int((numbers != env.world_size * (env.world_size + 1) / 2).sum())
    numbers.zero_()
    times = []
    for _ in range(REPEATS):
        started = time.monotonic()
        dist.all_reduce(numbers)
        float(numbers[0])  # waits for the device
        times.append(time.monotonic() - started)
    seconds, moved = statistics.median(times), 2 * (env.world_size - 1) / env.world_size * megabytes * 2**20
    card = torch.cuda.get_device_name(device) if cuda else "CPU"
    rate = f"{megabytes} MB in {seconds:.4f} s, {moved / seconds / 1e9:.4g} GB/s"
    line = f"{node_name()} rank {env.rank} ({card}): {rate}, {wrong} wrong\n"
    print(line, end="", flush=True)  # in one write, as other ranks print to the same place
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
