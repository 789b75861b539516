"""starts.jsonl: what ran, where and how it ended; a record for each start of a run, and one for its end.

Only rank 0 writes. Nothing of the environment is recorded. Home folder and user name are left out of the command, and
so are the values of overrides whose names contain key, token, secret or password.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.cluster.env import LAUNCHED, checkout
from aligner.errors import AlignerError, WriteError
from aligner.foreign import read_record
from aligner.run.marker_files import STOPPED
from aligner.run.metrics import append_jsonl, read_jsonl, rewrite_jsonl
from aligner.version import VERSION

if TYPE_CHECKING:
    import torch

FILE = "starts.jsonl"
FAILED = "logs/failed_start.log"  # error of the last start that failed before the first record
COMMAND = "ALIGNER_COMMAND"  # for ranks: the user's command to their launcher
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "tensorrt-llm")
GIT_S = 10.0
HIDDEN = "<hidden>"
_SECRET = re.compile(
    r"(?i)(?P<name>(?<![a-z])(?:[\w.]*[._-])?(?:api_?)?(?:key|token|secret|password|passwd|credentials?|auth))"
    r"(?P<sep>['\"]?\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,}\]]+)"
)
_KEYS = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-)[\w-]{16,}")  # as services write them


class Start:
    """This start of a run. Nothing is written before `accepted`: a refused start leaves a used folder unchanged."""

    def __init__(self, run_dir: str | Path, rank: int, record: dict[str, Any]):
        self.path, self.rank, self.record = Path(run_dir) / FILE, rank, record
        self.begun = False

    def accepted(self) -> None:
        """Record the start: the folder is this run's from now on."""
        if self.rank == 0:
            rewrite_jsonl(self.path, [*read_jsonl(self.path), self.record])
            self.begun = True

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Record how the block ended, in any case."""
        result = "done"
        try:
            yield
        except BaseException as error:  # a StopRequested, too
            result = f"{type(error).__name__}: {redacted(str(error))[:300]}"
            raise
        finally:
            if self.begun:
                try:
                    append_jsonl(self.path, [{"ended": now(), "result": result}])
                except WriteError as cause:  # the run's result does not depend on this line
                    print(f"warning: {cause}", file=sys.stderr)


def note_failed(run_dir: str | Path, error: BaseException) -> None:
    """Note a first start that failed, for people who look at the folder. A used folder is not changed."""
    folder = Path(run_dir)
    if (folder / FILE).exists():
        return
    with suppress(OSError):  # the error is reported anyway
        (folder / FAILED).parent.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).write_text(f"{now()}\nerror: {redacted(str(error) or repr(error))}\n", encoding="utf-8")


def start_record(ranks: int, device: torch.device, **facts: Any) -> dict[str, Any]:
    """Return the record of a run's start, with further `facts`."""
    commit, dirty = git_state(checkout())
    typed = os.environ.get(COMMAND) if LAUNCHED in os.environ else None
    command = typed or command_line(sys.argv[1:])
    return {
        "started": now(),
        "command": command,
        "commit": commit,
        "dirty": dirty,
        "versions": versions(),
        "host": platform.node(),
        "hardware": hardware(device),
        "ranks": ranks,
        **facts,
    }


def last_start_ns(run_dir: str | Path) -> int:
    """Return when a start or an end was last recorded in the folder (nanoseconds of its file system's clock), 0 for
    never."""
    path = Path(run_dir) / FILE
    return path.stat().st_mtime_ns if path.exists() else 0


def stopped_by_hand(run_dir: str | Path) -> bool:
    """Return whether the run has saved and stopped for a Ctrl-C. That is no success, or a shell's loop over runs
    would continue."""
    path = Path(run_dir) / STOPPED
    return path.exists() and read_record(path, AlignerError).text("reason", "") == signal.SIGINT.name


def left_by_exit(cause: SystemExit) -> AlignerError:
    """Return the error for code that ends the process in the middle of a run."""
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    return AlignerError(f"{where} left the run with sys.exit({cause.code!r}): expected a return, or an error")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as a user would repeat it, without home folder, user name and secrets."""
    return shlex.join(["aligner", *(_anonymous(redacted(text)) for text in arguments)])


def redacted(text: str) -> str:
    """Return the text with HIDDEN in place of the value after names such as `api_key` or `token` (not `max_tokens`)."""
    return _KEYS.sub(HIDDEN, _SECRET.sub(lambda m: f"{m['name']}{m['sep']}{HIDDEN}", text))


def _anonymous(text: str) -> str:
    with suppress(RuntimeError):  # a user without a home, or, below, a number without a name, as containers have them
        text = re.sub(rf"(?<![\w.~-]){re.escape(str(Path.home()))}(?=/|$)", "~", text)
    with suppress(KeyError, OSError):  # OSError from Python 3.13 on
        text = re.sub(rf"(?<=/){re.escape(getpass.getuser())}(?=/|$)", "$USER", text)
    return text


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether files differ from it) of the checkout at `root`; (None, None) if it is none, or without
    git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S).stdout.strip()

    try:
        top, _, commit = git("rev-parse", "--show-toplevel", "HEAD").rpartition("\n")
        if Path(top).resolve() != root.resolve():
            return None, None  # a checkout of something else, which contains an installed aligner
        return commit, bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


@cache
def versions() -> Mapping[str, str]:
    import torch

    versions_by_name = {"python": platform.python_version(), "aligner": VERSION}
    for name in PACKAGES:
        try:
            versions_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions_by_name["cuda"] = torch.version.cuda
    return versions_by_name


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the hardware of rank 0's node."""
    import psutil
    import torch

    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
