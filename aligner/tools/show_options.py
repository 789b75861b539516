"""Options of `aligner board` and `aligner keys`, separate from their code, so that `--help` does not wait for
imports."""

from __future__ import annotations

import argparse


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(name, help=text, description=text)
    if name == "keys":
        sub.add_argument("overrides", nargs="*", metavar="SECTION", help="optim, model.moe, ...; default: all keys")
        return
    sub.add_argument("overrides", nargs="*", metavar="FOLDER", help="of runs, or of folders of runs; default: runs")
    sub.add_argument("--port", type=int, default=8080, help="0: any that is free; default 8080")
