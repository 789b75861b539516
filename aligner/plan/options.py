"""Options of `aligner plan`, separate from its code, so that `--help` does not wait for Hydra and YAML."""

from __future__ import annotations

import argparse


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--gpus", type=int, metavar="N", help="in all (default: cluster.gpus, else 8)")
    sub.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    sub.add_argument("--device", default="h100", metavar="NAME", help="a100, h100 (default), h200, b200, gb200, gb300")
    sub.add_argument("--prompt-tokens", type=float, default=0, metavar="N", help="mean (default: half of the longest)")
    sub.add_argument(
        "--response-tokens", type=float, default=0, metavar="N", help="mean (default: half of the longest)"
    )
    sub.add_argument(
        "--lengths", default="", metavar="FILE", help="of responses: a length a line, perhaps with how many have it"
    )
    sub.add_argument("--criteria", type=float, default=0, metavar="N", help="of a row's rubric, mean (default 10)")
    sub.add_argument(
        "--engine-tensor-parallel", type=int, default=0, metavar="N", help="instead of engine.tensor_parallel: what if"
    )
    sub.add_argument(
        "--acceptance-length",
        type=float,
        default=0,
        metavar="N",
        help="tokens of a row and step with engine.draft_tokens",
    )
    sub.add_argument("--sweep", action="store_true", help="all layouts that fit, the fastest first")
    sub.add_argument("--top", type=int, default=20, metavar="N", help="rows that --sweep shows (default 20)")
    sub.add_argument("--json", action="store_true", help="print JSON")
