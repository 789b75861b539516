"""Options of `aligner check`, separate from its code, so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse

LAYOUTS = "layouts"


def add_subject(sub: argparse.ArgumentParser) -> None:
    """Add the first argument, which names the check."""
    sub.add_argument(
        "what",
        type=_subject,
        metavar="layouts|FILE.py:LOSS",
        help="layouts: compare loss and gradients of each with one rank's, on a CPU; a function: check it as "
        "algorithm.policy_loss, and then its layouts",
    )


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", default="", metavar="FILE", help="write the table, with every tensor, to this file")


def overrides(what: str, others: list[str]) -> list[str]:
    """Return the overrides, with those that a subject stands for; the stage is grpo unless they name one."""
    stage = [] if any(each.startswith("stage=") for each in others) else ["stage=grpo"]
    return others if what == LAYOUTS else [*stage, f"algorithm.policy_loss={what}", *others]


def _subject(what: str) -> str:
    from aligner.user_code import is_path

    if what != LAYOUTS and not is_path(what):
        raise argparse.ArgumentTypeError(f"{what!r}: expected {LAYOUTS}, or the path of a policy loss, my_loss.py:name")
    return what
