"""Options of `aligner shakedown`, separate from its code, so that `--help` does not wait for imports."""

from __future__ import annotations

import argparse


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(name, help=text, description=text)
    sub.add_argument("overrides", nargs="*", metavar="FOLDER | KEY=VALUE", help="default: runs/shakedown")
    sub.add_argument("--only", default="", metavar="RUNG,...", help="these rungs (default: all)")
    sub.add_argument("--cpu", action="store_true", help="without GPUs: a trial of the jobs themselves")
    sub.add_argument("--again", action="store_true", help="repeat rungs that have passed")
    sub.add_argument("--weights", default="", metavar="FOLDER", help="rung `published`: Qwen2.5-1.5B-Instruct")
    sub.add_argument(
        "--rows", default="", metavar="FOLDER", help="rung `published`: train.jsonl and test.jsonl of GSM8K"
    )
    sub.add_argument("--band", default="0.65,0.85", metavar="LOW,HIGH", help="of its accuracy (default: 0.65,0.85)")
