"""Options of `aligner convert-config`, separate from their code, so that `--help` does not wait for imports."""

from __future__ import annotations

import argparse


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(name, help=text, description=text)
    sub.set_defaults(overrides=[])
    sub.add_argument("file", metavar="FILE", help="YAML of TRL or veRL, a script or arguments of all three; -: stdin")
    sub.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs that it was for, if it does not say so")
    sub.add_argument(
        "--command",
        dest="command_of",
        default="",
        metavar="NAME",
        help="its trainer's command, if several fit: sft, dpo, reward, kto, grpo, rloo; train_sft, train_dpo, train_rm",
    )
    sub.add_argument("--name", default="", metavar="NAME", help="the experiment's name; default: the file's")
    sub.add_argument(
        "--out", default="converted", metavar="FOLDER", help="write FOLDER/experiment/NAME.yaml (default: converted)"
    )
