"""Options of `aligner check`, separate from its code, so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse

WHAT = ("layouts",)


def add_subject(sub: argparse.ArgumentParser) -> None:
    """Add the first argument, which names the check."""
    sub.add_argument("what", choices=WHAT, help="layouts: compare loss and gradients of each with one rank's, on a CPU")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", default="", metavar="FILE", help="write the table, with every tensor, to this file")
