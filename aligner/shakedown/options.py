"""Options of `aligner shakedown`, separate from its code, so that `--help` does not wait for imports."""

from __future__ import annotations

import argparse


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(name, help=text, description=text)
    sub.add_argument("overrides", nargs="*", metavar="FOLDER | KEY=VALUE", help="default: runs/shakedown")
    sub.add_argument("--only", default="", metavar="RUNG,...", help="these rungs (default: all)")
    sub.add_argument("--cpu", action="store_true", help="without GPUs: a trial of the jobs themselves")
    sub.add_argument("--again", action="store_true", help="repeat rungs that have passed")
