"""Runs that the board starts, and a stop for any run on this machine. A run is a process of the user's own command line
and outlives the board.

A stop works as in docs/how-to/resume.md: SIGTERM, upon which the run saves at its next step boundary. Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.board import safe_files
from aligner.board.compose import RunForm, composed
from aligner.board.runs import Board
from aligner.cluster.lock import NAME as LOCK
from aligner.cluster.lock import user_here
from aligner.config.validate import validate
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.foreign import JsonObject

LOG = "logs/board.log"  # in the run folder
DRY_S = 120


@dataclass
class Jobs:
    """Runs that were started here. Calls come from several threads."""

    started: dict[Path, subprocess.Popen] = field(default_factory=dict)  # by run folder
    _dry: dict[str, list[str]] = field(default_factory=dict)  # the command that `dry` has shown, by its key
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, wish: RunForm) -> dict[str, Any]:
        """Run `launch` in the background with its output in the run's folder. Raises AlignerError for what it would
        refuse."""
        if wish.command != "launch":
            raise ConfigError("command", wish.command, "launch: a job for Slurm is submitted")
        cfg = composed(wish)
        validate(cfg, wish.world_size())
        folder = Path(cfg.run.dir).expanduser().resolve()
        with self._lock:
            if self.pid(folder) is not None:
                raise ConfigError("run.dir", str(folder), "a folder that no other process uses")
            log = folder / LOG
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as output:
                    self.started[folder] = subprocess.Popen(
                        command(wish.argv()),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # a Ctrl-C at the board, or its end, is not the run's
                    )
            except OSError as error:
                raise ConfigError(
                    "run.dir", str(folder), "a folder that can be written", f"{error.strerror}."
                ) from None
        return self.status(folder)

    def dry(self, wish: RunForm) -> dict[str, str]:
        """Return what `submit` would write and call; `key` is for `submit`."""
        if wish.command != "submit":
            raise ConfigError("command", wish.command, "submit: a run on this machine is started")
        shown = _output(wish.argv("--dry-run"))
        key = secrets.token_urlsafe(16)
        self._dry = {key: wish.argv()}
        return {"text": shown, "key": key}

    def submit(self, key: str) -> dict[str, str]:
        """Submit the job that `dry` has shown last, once. Raises AlignerError for any other key, and where sbatch
        fails."""
        argv = self._dry.pop(key, None)
        if argv is None:
            raise AlignerError("submit: expected what a dry run has shown; run it again")
        return {"text": _output(argv)}

    def stop(self, folder: Path) -> dict[str, Any]:
        """Stop a run. Raises AlignerError if it is not on this machine."""
        pid = self.pid(folder)
        if pid is None:
            expected = "expected a run that is running on this machine. Cancel a Slurm job with scancel JOB"
            raise AlignerError(f"stop {str(folder)!r}: {expected}")
        with suppress(ProcessLookupError):  # it has just ended
            process = os.pidfd_open(pid)
            try:
                if self.pid(folder) == pid:  # still: the number may be another process's by now
                    signal.pidfd_send_signal(process, signal.SIGTERM)
            finally:
                os.close(process)
        return self.status(folder)

    def status(self, folder: Path) -> dict[str, Any]:
        """Return a run's state. `code`: the exit code of a run that was started here; None while it runs, or if it was
        started elsewhere."""
        ours, log = self.started.get(folder), ""
        with suppress(OSError), safe_files.opened(folder, LOG) as file:
            log = safe_files.end(file)
        return {
            "folder": str(folder),
            "pid": self.pid(folder),
            "code": ours.poll() if ours else None,
            "log": log,
        }

    def pid(self, folder: Path) -> int | None:
        """Return the process of a run: of a run that has just started from here, as it has no lock yet, else by the
        lock. Locks of other users are ignored, as they could name any process."""
        ours = self.started.get(folder)
        if ours and ours.poll() is None:
            return ours.pid
        with suppress(OSError):
            return user_here(folder) if (folder / LOCK).lstat().st_uid == os.geteuid() else None
        return None


def command(argv: Sequence[str]) -> list[str]:
    """Return the arguments of the user's own command line."""
    return [sys.executable, "-m", "aligner", *argv]


def _output(argv: Sequence[str]) -> str:
    """Return what the command prints. Raises AlignerError with its error output if it fails."""
    try:
        done = subprocess.run(
            command(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=DRY_S
        )
    except subprocess.TimeoutExpired:
        raise AlignerError(f"{shlex.join(argv)}: no end after {DRY_S} s") from None
    if done.returncode:
        raise AlignerError(done.stderr.strip().removeprefix("error: ") or f"exit code {done.returncode}")
    return done.stdout + done.stderr


def tail(path: Path) -> str:
    """Return the end of a log that this process wrote."""
    with path.open("rb") as file:
        return safe_files.end(file)


# --- endpoints

JOBS = Jobs()  # of this process


def start(board: Board, request: JsonObject) -> Any:
    return JOBS.start(RunForm.read(request))


def dry_run(board: Board, request: JsonObject) -> Any:
    return JOBS.dry(RunForm.read(request))


def submit(board: Board, request: JsonObject) -> Any:
    return JOBS.submit(request.text("key"))


def stop(board: Board, request: JsonObject) -> Any:
    folder = request.text("folder")
    if folder not in [job["folder"] for job in jobs(board, request)["jobs"]]:
        raise DataError(f"folder={folder!r}: expected the folder of a run that is running on this machine")
    return JOBS.stop(Path(folder))


def jobs(board: Board, request: JsonObject) -> Any:
    """Return the runs that were started here, and all others of the board's runs that are running on this machine."""
    by_folder = {folder: JOBS.status(folder) for folder in list(JOBS.started)}
    others = (folder for run in board.runs().values() if (folder := run.folder.resolve()) not in by_folder)
    return {"jobs": [*by_folder.values(), *(JOBS.status(folder) for folder in others if JOBS.pid(folder) is not None)]}
