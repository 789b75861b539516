"""A run as ranks on this machine, for `aligner launch` and the quick start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from aligner.cluster.launch import launch
from aligner.cluster.lock import RunLock
from aligner.config.on_demand import demanded
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.errors import ConfigError
from aligner.run.marker_files import DONE, STOPPED
from aligner.run.starts import COMMAND, command_line
from aligner.user_code import is_source


def imports(cfg: Config) -> list[str]:
    """Return modules that every rank of a run needs, and that start no threads: those that may be imported once for
    all."""
    stage = cfg.stage.name
    if is_source(stage):  # one of the project's that needs about the same
        stage = "grpo" if cfg.stage.its.rollouts else "sft"
    modules = ["aligner.config.resolve", "aligner.builders.stage", f"aligner.stages.{stage}"]
    return [*modules, *demanded(cfg), "transformers.models.auto.tokenization_auto"]


def launch_run(cfg: Config, ranks: int, freeze: Callable[[], Path], command: Sequence[str], last: bool = False) -> int:
    """Launch ranks and return the exit code. `freeze` writes the config, once nobody else is in the run's folder.
    `command` is the user's; `last` as in StopSignals. Raises ConfigError."""
    if ranks < 1:
        raise ConfigError("--ranks", ranks, "a number >= 1")
    os.environ[COMMAND] = command_line(command)
    validate(cfg, ranks)  # before processes start, so that the message comes once
    run_dir = Path(cfg.run.dir)
    proof = [run_dir / name for name in (DONE, STOPPED)]
    options = {"imports": imports(cfg), "proof": proof, "last": last}
    with RunLock(run_dir):
        return launch(freeze(), ranks, run_dir, threads=cfg.cluster.threads, **options)
