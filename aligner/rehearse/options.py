"""Options of `aligner rehearse`, separate from its code, so that `--help` does not wait for Hydra and YAML."""

from __future__ import annotations

import argparse

GPUS_PER_NODE = 8


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--gpus", type=int, metavar="N", help="in all (default: cluster.gpus, else 8)")
    sub.add_argument("--gpus-per-node", type=int, default=GPUS_PER_NODE, metavar="N", help=f"default {GPUS_PER_NODE}")
    sub.add_argument("--device", default="h100", metavar="NAME", help="a100, h100 (default), h200, b200, gb200, gb300")
    sub.add_argument(
        "--ranks",
        default="stages",
        metavar="WHICH",
        help="stages (default): one rank of each pipeline stage and one that only generates; all-distinct: of each the "
        "first and the last of every group; or numbers: 0,256,1023",
    )
    sub.add_argument("--json", metavar="FILE", help="write all results")
