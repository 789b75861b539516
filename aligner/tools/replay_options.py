"""The options of `aligner replay` and `aligner bisect`, apart from their code: `--help` must not wait for torch."""

from __future__ import annotations

import argparse

REPLAY = """examples:
  aligner replay runs/grpo --step 3417                       on the layout that it had
  aligner replay runs/grpo --step 3417 --ranks 4 parallel.tensor=2
It ends with 0 if the step is the one that the run wrote down, with 1 if it is another.
"""


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(
        name,
        help=text,
        description=text,
        epilog=REPLAY if name == "replay" else "It ends with 0 if no step differs, with 1 if one does.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("run", metavar="RUN")
    if name == "replay":
        sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what is to be otherwise, as the layout")
        sub.add_argument("--step", type=int, required=True, metavar="N", help="the last one that is executed")
        sub.add_argument("--ranks", type=int, default=0, metavar="N", help="processes; default: as many as it had")
    else:
        sub.add_argument("other", metavar="RUN")
        sub.set_defaults(overrides=[])
    sub.set_defaults(frozen=None, cfg=False, config_dir=None)
