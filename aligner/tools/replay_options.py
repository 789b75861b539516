"""Options of `aligner replay` and `aligner bisect`, separate from their code, so that `--help` does not wait for
torch."""

from __future__ import annotations

import argparse

REPLAY = """examples:
  aligner replay runs/grpo --step 3417                       on the layout that it had
  aligner replay runs/grpo --step 3417 --ranks 4 parallel.tensor=2
Exit code 0: the step is the same as recorded. 1: it differs.
"""


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(
        name,
        help=text,
        description=text,
        epilog=REPLAY if name == "replay" else "Exit code 0: no step differs. 1: one does.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("run", metavar="RUN")
    if name == "replay":
        sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys to change, for example the layout")
        sub.add_argument("--step", type=int, required=True, metavar="N", help="the last step to execute")
        sub.add_argument("--ranks", type=int, default=0, metavar="N", help="processes; default: as many as it had")
    else:
        sub.add_argument("other", metavar="RUN")
        sub.set_defaults(overrides=[])
    sub.set_defaults(frozen=None, cfg=False, config_dir=None)
