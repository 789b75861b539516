"""The command line. Every subcommand takes Hydra overrides; `--help` imports neither Hydra nor torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aligner import loading
from aligner.errors import NO_RESTART, AlignerError, ConfigError
from aligner.loading import for_good
from aligner.pipe import quiet_pipe
from aligner.version import VERSION

if TYPE_CHECKING:
    from aligner.config.schema import Config

INTERRUPTED = 128 + signal.SIGINT
COMMANDS = {
    "run": "run a stage in this process: one rank of a job, or alone",
    "launch": "run a stage as N ranks on this machine",
    "submit": "hand a stage, or a sweep as an array, to Slurm",
    "plan": "predict memory and step time on GPUs, and refuse what cannot fit",
    "recipes": "list recipes of published models and datasets, with what `plan` says of each",
    "data": "make a recipe's data from the folder of a published dataset",
    "convert-config": "translate a config of TRL, OpenRLHF or veRL",
    "rehearse": "run ranks of a job here, without its GPUs, and refuse what would fail there",
    "check": "compare loss and gradients of a model's layouts with one rank's, on a CPU: `check layouts`; with a "
    "loss of yours: `check my_loss.py:name`",
    "import": "turn a Hugging Face folder into a sharded checkpoint",
    "export": "turn a checkpoint into a Hugging Face folder",
    "sample": "sample answers to prompts, and write training files of them: run stage=sample",
    "eval": "evaluate a trained model on held-out rows",
    "chat": "talk to a trained model",
    "serve": "serve a trained model by OpenAI's API, to this machine or a cluster",
    "serve-rm": "serve a trained reward model over HTTP, for reward `http`",
    "replay": "execute a recorded step of a run again, and compare the results",
    "bisect": "find the first step, sample, token and tensor at which two runs differ",
    "report": "write report.html of one or more runs",
    "board": "show runs in the browser, on this machine alone",
    "doctor": "check this machine and a config before a run; `doctor sandbox`: where models' programs run",
    "shakedown": "check this machine's GPUs by small jobs, rung by rung, and write a report",
    "keys": "list config keys with type, default and meaning",
}
# keys that the stage does not read are refused
OF_A_STAGE = ("run", "launch", "submit", "plan", "rehearse", "check", "sample")
ALONE = ("eval", "chat", "serve")  # compute in this process, which is no rank of a job
OF_A_FOLDER = ("eval", "chat", "serve", "serve-rm")  # take a run folder alone, as run.dir=FOLDER
METAVARS = dict.fromkeys(("report", *OF_A_FOLDER), "RUN_DIR | KEY=VALUE")
EXAMPLES = """overrides (Hydra syntax) go anywhere after the subcommand:
  stage=grpo model=qwen3_0.6b         choose files of conf/stage, conf/model, ...
  optim.lr=1e-4 batch.group=16        set values
  experiment=NAME                     a whole recipe from conf/experiment
  optim.lr=1e-4,2e-4 --multirun       one run after another (run, launch)
"""


def parser() -> argparse.ArgumentParser:
    from aligner.cluster import convert_options, submit_options
    from aligner.plan import options as plan_options
    from aligner.rehearse import options as rehearse_options
    from aligner.shakedown import options as shakedown_options
    from aligner.tools import check_options, recipe_options, replay_options, show_options, translate_options

    own = dict.fromkeys(("import", "export"), convert_options.add_parser)
    own |= dict.fromkeys(("replay", "bisect"), replay_options.add_parser)
    own |= dict.fromkeys(("recipes", "data"), recipe_options.add_parser)
    own |= dict.fromkeys(("board", "keys"), show_options.add_parser)
    own |= {"convert-config": translate_options.add_parser, "shakedown": shakedown_options.add_parser}
    further = {"submit": submit_options, "plan": plan_options, "rehearse": rehearse_options, "check": check_options}
    top = argparse.ArgumentParser(
        prog="aligner",
        description="Align language models on Megatron-Core.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"aligner {VERSION}")
    subs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name in own:
            own[name](subs, name, text)
            continue
        sub = subs.add_parser(
            name, help=text, description=text, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == "check":
            check_options.add_subject(sub)
        sub.add_argument("overrides", nargs="*", metavar=METAVARS.get(name, "KEY=VALUE"))
        sub.add_argument("-c", "--config-dir", metavar="DIR", help="a further folder of config groups")
        sub.add_argument("--frozen", metavar="PATH", help="start from the config.yaml of a run instead of conf/")
        sub.add_argument("--cfg", action="store_true", help="print the resolved config and exit")
        if name in ("run", "launch", "sample"):
            sub.add_argument("-m", "--multirun", action="store_true", help="run every job of a sweep, one by one")
        if name == "launch":
            sub.add_argument("--ranks", type=int, required=True, metavar="N", help="processes to start")
        if name == "serve-rm":
            sub.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
            sub.add_argument("--port", type=int, default=5000, help="0: any that is free; default 5000")
        if name == "serve":
            convert_options.add_serve(sub)
        if name in further:
            further[name].add_arguments(sub)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 for a failure, 2 for bad input, 130 when interrupted; in a batch job
    NO_RESTART for errors that would come again. Without `argv`, use that of this process, which ends then."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    args.last, args.begun = argv is None, ""
    flags = [text for text in rest if text.startswith("-")]
    if flags:
        top.error(f"unknown option: {' '.join(flags)}{_as_a_key(flags[0])}")
    args.overrides += rest  # overrides behind an option
    if args.command in ALONE:
        from aligner.cluster.threads import reserve

        reserve()
    try:
        if getattr(args, "cfg", False) and not getattr(args, "multirun", False):
            return _print_config(args)
        return _HANDLERS[args.command](args) or 0
    except AlignerError as error:
        code = NO_RESTART if _in_job(args.command) and not error.transient else error.exit_code
        _say(error, code, traceback.format_exc() if os.environ.get("ALIGNER_TRACEBACK") == "1" else None)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # recorded for the launcher, then reported by Python
        from aligner.cluster import failure

        failure.record(traceback.format_exc(), 1)
        raise
    finally:
        if args.begun:  # last: it takes a while, and the launcher waits for the cause only some seconds
            from aligner.tools.report import write_after

            write_after([args.begun])


def _as_a_key(flag: str) -> str:
    """Return how to write a setting that was given as an option (`--learning_rate`). Empty for an unknown one."""
    from aligner.config.foreign_names import known_elsewhere

    name = flag.lstrip("-").partition("=")[0]
    setting = known_elsewhere(name)
    return f". Settings are KEY=VALUE: {setting if '=' in setting else f'{setting}=...'}" if setting else ""


def _in_job(command: str) -> bool:
    """Return whether a batch script reads the exit code of this run."""
    return command in ("run", "launch", "sample") and ("SLURM_JOB_ID" in os.environ or "ALIGNER_BATCH" in os.environ)


def _say(error: AlignerError, code: int, trace: str | None) -> None:
    """Print one line on stderr (a rank's own log beyond rank 0), and write a note for the launcher."""
    from aligner.cluster import failure

    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    line = f"error: {error}" if rank == "0" else f"error (rank {rank}): {error}"
    text = f"{trace}{line}" if trace else line
    print(text, file=sys.stderr, flush=True)
    failure.record(text, code)


def _config(args: argparse.Namespace) -> Config:
    """Compose the config, and set from it how this process will import Megatron."""
    cfg = _composed(args)
    loading.kernels = cfg.model.kernels
    if args.command in OF_A_STAGE and args.frozen is None and cfg.model.init != "random":
        _check_shape(args, cfg)
    return cfg


def _composed(args: argparse.Namespace) -> Config:
    """Return the composed config, or a run's frozen one with overrides on top: --frozen, and the run folder of eval,
    chat, serve and serve-rm."""
    with for_good():
        from aligner.config.freeze import FILE_NAME, load_frozen
        from aligner.config.resolve import compose, compose_over
        from aligner.config.unread import compose_run, refuse_unread

    runs, frozen = args.command in OF_A_STAGE, args.frozen
    if args.command in OF_A_FOLDER:
        folder = _take_folder(args)
        if frozen is None and folder and (Path(folder) / FILE_NAME).is_file():
            frozen = folder
    if frozen is None:
        return (compose_run if runs else compose)(args.overrides, config_dir=args.config_dir)
    base = load_frozen(frozen)
    if not args.overrides:  # the case of all ranks of a job
        return base
    cfg = compose_over(base, args.overrides)
    if runs:
        refuse_unread(cfg, args.overrides)
    return cfg


def _check_shape(args: argparse.Namespace, cfg: Config) -> None:
    """Refuse keys of the model's shape that contradict the folder of `model.init`, if it exists already."""
    from aligner.config.unread import shape_asked

    keys, preset = shape_asked(args.overrides, args.config_dir)
    if keys or preset:
        with for_good():
            from aligner.roles.shape_check import check_shape

        if line := check_shape(cfg, keys, preset):
            print(line, file=sys.stderr, flush=True)


def _print_config(args: argparse.Namespace) -> int:
    """Print the config for --cfg."""
    from aligner.config.freeze import to_yaml

    if args.command == "report":
        _take_folders(args)
    cfg = _config(args)
    if cfg.model.init != "random":
        from aligner.roles.shape_check import with_real_shape

        cfg = with_real_shape(cfg)
    print(to_yaml(cfg), end="")
    return 0


def _frozen_path(args: argparse.Namespace, cfg: Config) -> Path:
    """Write the config into the run folder, unless it was read from there unchanged."""
    from aligner.config.freeze import FILE_NAME, freeze_start, refuse

    target = Path(cfg.run.dir) / FILE_NAME
    if args.frozen and not args.overrides and target.exists() and target.samefile(args.frozen):
        refuse(cfg.run.dir)
        return target
    return freeze_start(cfg)


def _run(args: argparse.Namespace) -> int:
    from aligner.cluster.env import LAUNCHED
    from aligner.cluster.lock import RunLock
    from aligner.cluster.mpi import join
    from aligner.cluster.signals import StopSignals
    from aligner.cluster.threads import reserve
    from aligner.config.derived import batch_arithmetic
    from aligner.config.validate import validate

    loading.check_torch()
    world = join()
    env = world.env
    if args.multirun:
        if env.world_size > 1:
            raise ConfigError("--multirun", env.world_size, "a single process", "Use `launch --ranks N --multirun`.")
        return _multirun(args)
    cfg = _config(args)
    validate(cfg, env.world_size)
    reserve()
    with (
        StopSignals(cfg.cluster.signal, args.last) as signals,  # before torch's seconds of imports
        RunLock(Path(cfg.run.dir)) if env.rank == 0 and LAUNCHED not in os.environ else nullcontext(),
    ):
        if env.rank == 0:
            print(batch_arithmetic(cfg, env.world_size), flush=True)
            _frozen_path(args, cfg)
        with for_good():
            from aligner.builders.stage import run_stage
            from aligner.run.starts import last_start_ns, left_by_exit, note_failed, stopped_by_hand

        before = last_start_ns(cfg.run.dir)
        try:
            code = run_stage(cfg, env, signals) or 0
        except SystemExit as cause:  # of a library, or of code that a dataset or a model brings
            raise left_by_exit(cause) from cause
        except Exception as error:
            if env.rank == 0:
                note_failed(cfg.run.dir, error)
            raise
        finally:
            if env.rank == 0 and last_start_ns(cfg.run.dir) != before:
                args.begun = cfg.run.dir
        world.leave(code == 0)
    return INTERRUPTED if env.launcher == "single" and stopped_by_hand(cfg.run.dir) else code


def _sample(args: argparse.Namespace) -> int:
    args.overrides.insert(0, "stage=sample")
    return _run(args)


def _launch(args: argparse.Namespace) -> int:
    if args.multirun:
        return _multirun(args)
    from aligner.run.launched import launch_run
    from aligner.run.starts import stopped_by_hand

    cfg = _config(args)
    code = launch_run(cfg, args.ranks, lambda: _frozen_path(args, cfg), sys.argv[1:], args.last)
    return INTERRUPTED if code == 0 and stopped_by_hand(cfg.run.dir) else code


def _submit(args: argparse.Namespace) -> int:
    with for_good():
        from aligner.cluster import submit
        from aligner.rehearse.command import check

    if not (args.frozen or args.multirun):
        _config(args)  # to check the model's shape
    return submit.main(args, check)


def _plan(args: argparse.Namespace) -> int:
    """Run `plan` or `rehearse`, whose GPUs need not be here."""
    from aligner.plan import command as plan
    from aligner.rehearse import command as rehearse

    cfg = _with_vocabulary(_config(args))
    args.gpus = cfg.cluster.gpus or 8 if args.gpus is None else args.gpus
    return (plan if args.command == "plan" else rehearse).main(args, cfg)


def _check(args: argparse.Namespace) -> int:
    from aligner.tools import check_options

    args.overrides = check_options.overrides(args.what, args.overrides)
    cfg = _config(args)
    with for_good():
        from aligner.tools.layouts import check

    return check.main(args, cfg)


def _with_vocabulary(cfg: Config) -> Config:
    """Return the config with the size of its tokenizer, where only the tokenizer knows it and its folder is here."""
    model = cfg.model
    known = model.init != "random" or model.vocab_size or not model.tokenizer
    if known or not Path(model.tokenizer).expanduser().is_dir():
        return cfg
    from aligner.data.tokenizer import load_tokenizer

    return replace(cfg, model=replace(model, vocab_size=len(load_tokenizer(model.tokenizer, announce=False))))


def _recipes(args: argparse.Namespace) -> int:
    from aligner.tools import convert_config, published_data, recipes

    return {"data": published_data, "recipes": recipes}.get(args.command, convert_config).main(args)


def _multirun(args: argparse.Namespace) -> int:
    from aligner.tools import multirun

    return multirun.main(args)


def _convert(args: argparse.Namespace) -> int:
    from aligner.cluster.env import rank_env

    if args.overrides:
        raise ConfigError("FOLDER", args.overrides[0], "only options after the two folders")
    if args.command == "export":
        args.source = args.source.removeprefix("run.dir=")
    if not args.ranks:
        with for_good():
            from aligner.tools import convert

        return convert.main(args, rank_env())
    from aligner.cluster.convert_options import again
    from aligner.cluster.launch import launch

    target = Path(args.target)
    return launch(target, args.ranks, target.with_name(target.name + ".partial"), argv=again(args))


def _eval(args: argparse.Namespace) -> int:
    from aligner.cluster.env import rank_env

    env, cfg = rank_env(), _config(args)
    with for_good():
        from aligner.tools import evaluate

    return evaluate.main(cfg, env, args.overrides)


def _chat(args: argparse.Namespace) -> int:
    cfg = _config(args)
    with for_good():
        from aligner.tools import chat

    return chat.main(cfg)


def _serve(args: argparse.Namespace) -> int:
    cfg = _config(args)
    if args.ranks:
        from aligner.cluster import convert_options, launch

        folder, argv = Path(cfg.run.dir), convert_options.serve_again(args)
        return launch.launch(folder, args.ranks, folder, threads=cfg.cluster.threads, argv=argv)
    with for_good():
        from aligner.tools import serve

    return serve.main(cfg, args.port, args.socket, args.host)


def _take_folder(args: argparse.Namespace) -> str:
    """Find the run folder among the overrides, alone or as run.dir=FOLDER; one that stands alone becomes run.dir.
    Empty where none is named."""
    from aligner.config.resolve import quoted

    folders = _take_folders(args)
    named = [text.partition("=")[2].strip("'\"") for text in args.overrides if text.startswith("run.dir=")]
    if len(folders) + bool(named) > 1:
        raise ConfigError("RUN_DIR", folders[-1], "the folder of one run, alone or as run.dir=FOLDER")
    args.overrides += [f"run.dir={quoted(folder)}" for folder in folders]
    return ["", *named, *folders][-1]


def _serve_rm(args: argparse.Namespace) -> int:
    cfg = _config(args)
    with for_good():
        from aligner.tools import serve_rm

    return serve_rm.main(cfg, args.host, args.port)


def _report(args: argparse.Namespace) -> int:
    folders = _take_folders(args)
    if args.overrides or args.frozen or not folders:
        cfg = _config(args)  # composed even where folders are named: a wrong key is an error
        folders = folders or [cfg.run.dir]
    from aligner.tools import report

    return report.main(folders)


def _board(args: argparse.Namespace) -> int:
    from aligner.tools import board

    return board.main(args.overrides or ["runs"], args.port)


def _replay(args: argparse.Namespace) -> int:
    with for_good():
        from aligner.tools import replay

    return replay.main(args)


def _bisect(args: argparse.Namespace) -> int:
    with for_good():
        from aligner.tools import bisect

    return bisect.main(args)


def _take_folders(args: argparse.Namespace) -> list[str]:
    """Remove and return the folders among the overrides."""
    folders = [text for text in args.overrides if "=" not in text or Path(text).is_dir()]
    args.overrides = [text for text in args.overrides if text not in folders]
    return folders


def _doctor(args: argparse.Namespace) -> int:
    if args.overrides == ["sandbox"]:
        from aligner.tools import doctor_sandbox

        return doctor_sandbox.main()
    from aligner.cluster.env import rank_env

    env, cfg = rank_env(), _config(args)
    from aligner.tools import doctor

    return doctor.main(cfg, env)


def _shakedown(args: argparse.Namespace) -> int:
    from aligner.shakedown import command

    return command.main(args)


def _keys(args: argparse.Namespace) -> None:
    from aligner.config.reference import listing

    print(listing(args.overrides), end="")


_HANDLERS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "run": _run,
    "launch": _launch,
    "submit": _submit,
    "plan": _plan,
    "rehearse": _plan,
    "recipes": _recipes,
    "data": _recipes,
    "convert-config": _recipes,
    "check": _check,
    "import": _convert,
    "export": _convert,
    "sample": _sample,
    "eval": _eval,
    "chat": _chat,
    "serve": _serve,
    "serve-rm": _serve_rm,
    "replay": _replay,
    "bisect": _bisect,
    "report": _report,
    "board": _board,
    "doctor": _doctor,
    "shakedown": _shakedown,
    "keys": _keys,
}


def entry() -> None:
    """Run the `aligner` command. Like `python -m aligner` it finds modules in the current folder."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    try:
        with quiet_pipe():
            sys.exit(main())
    except SystemExit as end:
        if end.code == INTERRUPTED:  # as a shell expects: otherwise its loops continue after Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise


if __name__ == "__main__":
    entry()
