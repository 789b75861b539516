"""Options of `aligner import`, `export` and `serve`, which `--ranks` starts as ranks on this machine. They are separate
from their code, so that `--help` does not wait for torch."""

from __future__ import annotations

import argparse
import sys

EPILOG = """examples:
  aligner import /models/Qwen3-30B-A3B runs/qwen3 --ranks 8 --tensor 8
  aligner export runs/grpo exported --ranks 4
Under srun or mpirun leave --ranks out: the job's ranks share the work. An interrupted
conversion continues where it was.
"""


def add_parser(subs: argparse._SubParsersAction, name: str, text: str) -> None:
    sub = subs.add_parser(
        name,
        help=text,
        description=text,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    coming = name == "import"
    sub.add_argument("source", metavar="FOLDER" if coming else "RUN_DIR | CHECKPOINT")
    sub.add_argument("target", metavar="FOLDER", help="to be created; refused if it exists")
    sub.add_argument("--ranks", type=int, default=0, metavar="N", help="processes to start on this machine")
    sub.add_argument("--fresh", action="store_true", help="discard the files of an interrupted conversion")
    sub.add_argument("--file-bytes", type=float, default=1e9 if coming else 5e9, metavar="N", help="of a weight file")
    if coming:
        help_text = "cut tensors into so many pieces: the tensor-parallel size that will read them"
        sub.add_argument("--tensor", type=int, default=1, metavar="N", help=help_text)
    else:
        help_text = "of a run with model.lora: the whole model, with its adapters merged, instead of a peft folder"
        sub.add_argument("--merge", action="store_true", help=help_text)
        sub.add_argument("--part", default="", metavar="NAME", help="of the checkpoint: policy, critic, model")
    sub.add_argument("--family", default="", metavar="PATH.py:NAME", help="a model family of yours: model.family")
    sub.set_defaults(overrides=[], frozen=None, cfg=False, config_dir=None)


def again(args: argparse.Namespace) -> list[str]:
    """Return the command line of each of the ranks that `--ranks` starts."""
    options = ["--file-bytes", str(args.file_bytes), "--family", args.family, *["--fresh"] * args.fresh]
    options += (
        ["--tensor", str(args.tensor)] if args.command == "import" else ["--part", args.part, *["--merge"] * args.merge]
    )
    return [sys.executable, "-m", "aligner", args.command, args.source, args.target, *options]


def add_serve(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--port", type=int, default=8000, help="0: any that is free; default 8000")
    sub.add_argument("--socket", default="", metavar="PATH", help="a unix socket to listen on instead")
    sub.add_argument(
        "--host", default="", metavar="ADDRESS", help="listen there instead of on the loopback, for clients with a key"
    )
    sub.add_argument("--ranks", type=int, default=0, metavar="N", help="processes to start on this machine")


def serve_again(args: argparse.Namespace) -> list[str]:
    """Do the same for `serve`."""
    options = ["--port", str(args.port)]
    for name in ("socket", "host", "frozen", "config_dir"):
        if value := getattr(args, name):
            options += [f"--{name.replace('_', '-')}", value]
    return [sys.executable, "-m", "aligner", "serve", *args.overrides, *options]
