"""Runs from Python, as in a notebook: `aligner.train`.

    this process ──> guard ──> aligner run (or launch) ──> ranks

The run is a process of its own, by the command line, so that Megatron's global state, a crash or a lack of memory stay
there. Callbacks run here: they get what the run writes to metrics.jsonl. It imports no torch.
"""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aligner.cluster import failure
from aligner.config.freeze import freeze
from aligner.config.schema import Config
from aligner.config.unread import compose_run
from aligner.config.validate import validate
from aligner.errors import AlignerError, ConfigError, RunFailedError
from aligner.foreign import read_record
from aligner.processes import guarded
from aligner.run.marker_files import PROGRESS, STOPPED
from aligner.run.metrics import jsonl_records, read_jsonl

METRICS = "metrics.jsonl"
POLL_S = 0.1
BY_HAND = (-signal.SIGINT, 128 + signal.SIGINT)  # exit codes of a run that a Ctrl-C stopped
LAST_LINES = 20  # of the output, for a failure that the run could not record

OnMetrics = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class RunResult:
    """A run's end, and what it left behind."""

    dir: Path
    ended: str  # done, or why it saved and stopped earlier: SIGINT for a Ctrl-C
    step: int  # the last complete one
    metrics: list[dict[str, Any]]  # a record of each step, also of earlier starts of this run
    checkpoint: Path | None  # the newest
    model: Path | None  # the exported Hugging Face folder


def train(
    config: Config | Sequence[str] | str,
    *,
    ranks: int = 1,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_end: Callable[[RunResult], object] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Run a stage to its end, in a process of its own, and return its result.

    `config`: overrides as on the command line, or a composed config (`aligner.compose`). `ranks`: processes on this
    machine. `on_step` gets the record of each step in metrics.jsonl, once it is complete: when the next one begins or
    the run ends. `on_evaluation` gets `step` and the numbers of each evaluation, `on_end` the result. `quiet` hides
    what the run prints.

    Raises ConfigError and other errors of bad input before anything starts, and RunFailedError for a run that failed.
    Ctrl-C, or a callback that raises, has the run save and stop first. Ctrl-C then returns the result; a second one
    kills the run.
    """
    overrides = [] if isinstance(config, Config) else shlex.split(config) if isinstance(config, str) else list(config)
    cfg = config if isinstance(config, Config) else compose_run(overrides)
    validate(cfg, ranks)
    if (on_step or on_evaluation) and not cfg.logging.jsonl:
        raise ConfigError("logging.jsonl", False, "true with callbacks, which get the records of metrics.jsonl")
    folder = Path(cfg.run.dir)
    with tempfile.TemporaryDirectory() as aside:
        command = ["run"] if ranks == 1 else ["launch", "--ranks", str(ranks)]
        command += ["--frozen", str(freeze(cfg, aside))] if isinstance(config, Config) else overrides
        with closing(_Child(command, Path(aside), quiet)) as child:
            _follow(folder, child, _Records(folder / METRICS, on_step, on_evaluation))
    result = _result(folder)
    if on_end is not None:
        on_end(result)
    return result


def _result(folder: Path) -> RunResult:
    progress, stopped = read_record(folder / PROGRESS, AlignerError), folder / STOPPED
    saved = progress.integer("saved")
    checkpoint, model = folder / f"checkpoints/step-{saved:08d}", folder / "hf"
    return RunResult(
        folder,
        read_record(stopped, AlignerError).text("reason") if stopped.exists() else "done",
        progress.integer("step"),
        read_jsonl(folder / METRICS),
        checkpoint if checkpoint.is_dir() else None,
        model if model.is_dir() and not stopped.exists() else None,
    )


def _whole(folder: Path, child: _Child) -> bool:
    """Return whether the run ended as asked: done, or stopped and saved."""
    return child.code == 0 or (child.code in BY_HAND and (folder / STOPPED).exists())


def _follow(folder: Path, child: _Child, records: _Records) -> None:
    """Call the callbacks until the run ends. Raises RunFailedError, KeyboardInterrupt."""
    try:
        while not child.ended():
            records.deliver(whole=False)
    except BaseException as error:  # also of a callback: the run saves, and the caller learns why
        child.stop()
        if not (isinstance(error, KeyboardInterrupt) and _whole(folder, child)):
            raise
    if not _whole(folder, child):
        raise child.failed()
    records.deliver(whole=True)


class _Child:
    """`aligner COMMAND` as a guarded process, with its output in a file of the folder `aside`."""

    def __init__(self, command: Sequence[str], aside: Path, quiet: bool):
        self._note, self._quiet = aside / "failure.json", quiet
        path = aside / "output.log"
        environment = os.environ | {failure.VARIABLE: str(self._note)}
        with path.open("wb") as output:
            line = guarded([sys.executable, "-m", "aligner", *command])
            self._guard = subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._output = path.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # its last character may still grow
        self.code: int | None = None

    def close(self) -> None:
        self._output.close()

    def ended(self) -> bool:
        """Wait a moment, show new output; return whether the run has ended."""
        try:
            self.code = self._guard.wait(POLL_S)
        except subprocess.TimeoutExpired:
            self.code = None
        if not self._quiet and (text := self._decoder.decode(self._output.read())):
            print(text, end="", flush=True)
        return self.code is not None

    def stop(self) -> None:
        """Have the run save and stop, and wait for it. A second Ctrl-C, or what else is raised here, kills it."""
        try:
            guard = psutil.Process(self._guard.pid)
            while not (begun := guard.children()) and not self.ended():
                pass
            for process in begun:
                process.send_signal(signal.SIGINT)
            while not self.ended():
                pass
        except psutil.NoSuchProcess:
            self.code = self._guard.wait()
        finally:
            if self._guard.poll() is None:
                self._guard.terminate()
                self._guard.wait()

    def failed(self) -> RunFailedError:
        """Return the error of a run that failed: its own words, or the end of its output."""
        note = failure.read(self._note)
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", "replace").splitlines()
        shown = [line for line in lines if line.startswith("error")] or lines[-LAST_LINES:]
        return RunFailedError(note.text if note else "\n".join(shown), self.code or 0)


class _Records:
    """The records that this start of the run writes: each goes once to the callbacks, in order, when it is complete.
    The last one may still grow."""

    def __init__(self, path: Path, on_step: OnMetrics | None, on_evaluation: OnMetrics | None):
        self._path, self._on_step, self._on_evaluation = path, on_step, on_evaluation
        self._since_s, self._offset, self._size = time.time(), 0, -1

    def deliver(self, whole: bool) -> None:
        """Deliver new records; `whole`: the last one as well."""
        size = self._path.stat().st_size if self._path.exists() else -1
        if size == self._size and not whole:
            return
        self._size, waiting = size, list(self._new())
        for record, end in waiting if whole else waiting[:-1]:
            self._offset = end
            evaluation = {name: value for name, value in record.items() if name.startswith("eval/")}
            if self._on_step is not None and record["step"]:
                self._on_step(record)
            if self._on_evaluation is not None and evaluation:
                self._on_evaluation({"step": record["step"], **evaluation})

    def _new(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield records with the offset of their end. A resumed run cuts off older ones: they are not counted."""
        if self._size < 0:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            end = self._offset
            for line in file:
                end += len(line)
                for record in jsonl_records([line], str(self._path)) if line.endswith(b"\n") else ():
                    if record["wall_time"] >= self._since_s:
                        yield record, end
