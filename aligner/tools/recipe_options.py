"""Options of `aligner recipes` and `aligner data`, separate from their code, so that `--help` does not wait for
imports."""

from __future__ import annotations

import argparse


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(name, help=text, description=text)
    sub.set_defaults(overrides=[])
    if name == "recipes":
        sub.add_argument("names", nargs="*", metavar="NAME", help="show what these need; default: list all")
        return
    sub.add_argument("name", nargs="?", default="", metavar="NAME", help="dataset; without one: list all")
    sub.add_argument("folder", nargs="?", default="", metavar="FOLDER", help="where it was downloaded to")
    sub.add_argument("--out", default="data", metavar="FOLDER", help="write FOLDER/NAME (default: data)")
    sub.add_argument("--rows", type=int, default=0, metavar="N", help="read so many rows; 0, the default: all")
