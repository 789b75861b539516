"""Options of `aligner shakedown`, separate from its code, so that `--help` does not wait for imports."""

from __future__ import annotations

import argparse


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--only", default="", metavar="RUNG,...", help="these rungs (default: all)")
    sub.add_argument("--cpu", action="store_true", help="without GPUs: a trial of the jobs themselves")
    sub.add_argument("--again", action="store_true", help="repeat rungs that have passed")
