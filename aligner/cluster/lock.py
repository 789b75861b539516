"""Who uses a run folder: the file `lock.json` in it, so that two processes never train into one folder.

Works without locks of the file system, which shared ones often lack: the file is made by a hard link (or O_EXCL), its
owner touches it every BEAT_S, and its age is read from the clock that the file system itself puts on a fresh file. An
owner that is gone, or that is an earlier start of the same Slurm job, is followed at once; one on another host whose
file has not been touched for STALE_S too. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from aligner.cluster import failure
from aligner.errors import AlignerError, ConfigError
from aligner.foreign import read_record

NAME = "lock.json"
BEAT_S = 15.0
STALE_S = 300.0
POLL_S = 1.0
MAX_BYTES = 1 << 16  # of the file


def _started(pid: int) -> int | None:
    """When a process of this host began, in ticks since boot, by which a number used again is told; None if it is gone
    (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])  # field 22


def _lives(pid: int, started: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, whose /proc may be hidden
        return True
    return _started(pid) == started


def _place() -> str:
    """Numbers of processes mean the same only within one boot and one namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def user_here(folder: Path) -> int | None:
    """The process on this machine that uses a run folder; None: nobody does, or only elsewhere. Whoever can write the
    file can name any process in it: the one meant is of this user, and has the file open."""
    owner = _read(folder / NAME)
    here = owner.get("place") == _place() and _lives(owner["pid"], owner["started"])
    return owner["pid"] if here and _has_open(owner["pid"], folder / NAME) else None


def _has_open(pid: int, path: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        wanted, files = path.lstat(), os.listdir(process / "fd")
    except OSError:
        return False
    for number in files:
        with suppress(OSError):  # closed since
            file = process / "fd" / number
            if os.readlink(file).endswith(f"/{path.name}") and os.path.samestat(file.stat(), wanted):
                return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """What the file says; empty if there is none, or none that a run has written."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.lstat().st_size > MAX_BYTES:
            return {}
        found = read_record(path, AlignerError)
        found.integer("pid", low=1), found.integer("started"), found.text("id"), found.text("place")
        return found.fields
    except (OSError, AlignerError):
        return {}


def _myself() -> dict[str, Any]:
    """`attempt`: which start of the job this is, by Slurm and by the batch script; of one start, two steps may run at a
    time."""
    return {
        "id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "place": _place(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "attempt": [os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "ALIGNER_LOGS")],
        "time": time.strftime("%F %T"),
    }


class RunLock:
    """While entered, this process alone uses the folder. Raises ConfigError if another one does, or if the folder
    cannot be written. `lost`: called in a thread, with the reason, if the file is another's or gone meanwhile."""

    def __init__(self, folder: Path, lost: Callable[[str], None] | None = None, beat_s: float = BEAT_S):
        self.folder, self.path, self.lost, self.beat_s = folder, folder / NAME, lost or _leave, beat_s
        self.mine: dict[str, Any] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TextIO | None = None  # open as long as the folder is used: see `user_here`

    def __enter__(self) -> RunLock:
        self.mine = _myself()
        aside = self.folder / f".{NAME}.{self.mine['id']}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(self.mine), encoding="utf-8")
            try:
                while not self._make(aside):
                    self._follow(aside)
                self._file = self.path.open(encoding="utf-8")
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            expected = "a folder that can be written"
            raise ConfigError("run.dir", str(self.folder), expected, f"{error.strerror}.") from None
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.close()
        if _read(self.path).get("id") == self.mine["id"]:
            self.path.unlink(missing_ok=True)

    def _make(self, aside: Path) -> bool:
        """Whether the file could be made; whole from the first moment where the file system has hard links."""
        try:
            os.link(aside, self.path)
        except FileExistsError:
            return False
        except OSError:
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(self.mine))
            except FileExistsError:
                return False
        return True

    def _follow(self, aside: Path) -> None:
        """Wait until the owner is gone for good, and take the file away. Raises ConfigError if it lives."""
        owner, first, told = _read(self.path), self._touched(), False
        while (why := self._gone(owner, aside)) is None:
            if first is None or self._touched() is None:
                return  # it has just ended
            if owner.get("place") == self.mine["place"] or self._touched() != first:
                raise self._refusal(owner)
            if not told:
                told = True
                print(f"{self.path} is of {_named(owner)}: waiting for a sign of life", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        self._take(owner, why)

    def _gone(self, owner: dict[str, Any], aside: Path) -> str | None:
        """Why the owner is no more, None if it may be there."""
        if owner.get("place") == self.mine["place"]:
            lives = owner["pid"] != self.mine["pid"] and _lives(owner["pid"], owner["started"])
            return None if lives else "which has ended"
        if owner.get("job") and owner["job"] == self.mine["job"] and owner.get("attempt") != self.mine["attempt"]:
            return "an earlier start of this job"
        touched = self._touched()
        os.utime(aside)  # by the file system's clock
        silent_s = 0.0 if touched is None else aside.stat().st_mtime - touched
        return f"silent for {silent_s:.0f} s" if silent_s > STALE_S else None

    def _touched(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def _take(self, owner: dict[str, Any], why: str) -> None:
        """Remove the file of `owner`. Of several processes that want to, the one that makes the claim may: whoever
        comes later finds another owner."""
        claim = self.folder / f".{NAME}.{owner.get('id', 'torn')}.claim"
        try:
            claim.open("x").close()
        except FileExistsError:
            if time.time() - claim.stat().st_mtime > STALE_S:  # of one that died within these lines
                claim.unlink(missing_ok=True)
            time.sleep(0.05)
            return
        try:
            if _read(self.path) == owner:
                self.path.unlink(missing_ok=True)
                print(f"{self.path} was of {_named(owner)}, {why}: taking it over", file=sys.stderr, flush=True)
        finally:
            claim.unlink(missing_ok=True)

    def _refusal(self, owner: dict[str, Any]) -> ConfigError:
        hint = f"End that one, or choose another run.dir. If it is gone, delete {self.path}"
        expected = f"a folder that no other process uses; {_named(owner)} does since {owner.get('time', '?')}"
        return ConfigError("run.dir", str(self.folder), expected, hint)

    def _beat(self) -> None:
        try:
            why = self._until_lost()
        except BaseException as error:  # whatever it is: nobody else keeps the file fresh
            why = f"{self.path}: its thread has ended by {type(error).__name__}: {error}"
        if why:
            self.lost(why)

    def _until_lost(self) -> str:
        """Why it is; empty where the folder is left."""
        while not self._ended.wait(self.beat_s):
            try:
                owner = json.loads(self.path.read_text(encoding="utf-8"))
                if not isinstance(owner, dict) or owner.get("id") != self.mine["id"]:
                    named = _named(owner if isinstance(owner, dict) else {})
                    return f"{self.path} is of {named} now: this run was silent for too long"
                os.utime(self.path)
            except FileNotFoundError:
                return f"{self.path} is gone: the run folder was deleted or moved"
            except (OSError, ValueError):  # a file system that is away for a moment
                continue
        return ""


def _named(owner: dict[str, Any]) -> str:
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{job}"


def _leave(why: str) -> None:
    """Ends the process: what it would write is another's, or would make half of a folder."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    failure.record(f"error: {why}", 1)
    os._exit(1)
