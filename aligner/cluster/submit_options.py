"""Options of `aligner submit`, separate from its code, so that `--help` does not wait for Hydra and YAML."""

from __future__ import annotations

import argparse


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--site", metavar="NAME|FILE", help="of slurm/sites (default: $ALIGNER_SITE, else generic)")
    sub.add_argument("--nodes", type=int, default=0, metavar="N", help="nodes (default 1)")
    sub.add_argument("--engine-nodes", type=int, default=0, metavar="N", help="further nodes, for engine.ranks alone")
    sub.add_argument("--ranks-per-node", type=int, default=0, metavar="N", help="default: the site's, one per GPU")
    sub.add_argument("--ranks", type=int, default=0, metavar="N", help="without a scheduler: processes to start")
    sub.add_argument("--spare", type=int, default=0, metavar="N", help="further nodes that replace bad ones")
    sub.add_argument("--after", action="append", default=[], metavar="JOB", help="start when that job has ended well")
    sub.add_argument("--upstream", action="append", default=[], metavar="RUN_DIR", help="a run that must be finished")
    sub.add_argument("--max-requeues", type=int, default=20, metavar="N", help="default 20")
    sub.add_argument(
        "--sbatch", action="append", default=[], metavar="FLAG", help="a flag for sbatch: --sbatch=--qos=x"
    )
    sub.add_argument("-m", "--multirun", action="store_true", help="a sweep, as a job array")
    sub.add_argument("--at-once", type=int, default=0, metavar="N", help="of a sweep: jobs that may run at a time")
    sub.add_argument(
        "--rehearse",
        action="store_true",
        help="first rehearse some of its ranks here, and refuse a job that would fail",
    )
    sub.add_argument("--dry-run", action="store_true", help="print the script and the command, write nothing")
    sub.add_argument("--test-only", action="store_true", help="ask Slurm when it would start, submit nothing")
    sub.add_argument("--parsable", action="store_true", help="print the job's number only")
    sub.add_argument("--shell", action="store_true", help="inside a job: print the lines that the launchers evaluate")
