"""The file `lock.json` in a run folder names the process that uses it, so that two processes never train into one
folder.

Works without locks of the file system, which shared ones often lack. The file is made by a hard link (or O_EXCL). Its
owner touches it every BEAT_S, and its age is read from the clock that the file system itself puts on a fresh file. A
dead owner, or an earlier start of the same Slurm job, is replaced at once; an owner on another host whose file has not
been touched for STALE_S, too. Imports no torch.
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
    """Return the start of a process of this host in ticks since boot, which tells reused numbers apart; None if it has
    ended (Linux)."""
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


def _machine() -> str:
    """Return an id of this boot and namespace, within which numbers of processes mean the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def user_here(folder: Path) -> int | None:
    """Return the process on this machine that uses a run folder; None if there is none, or only elsewhere. Any process
    can be named by those who can write the file, so the process must be this user's and have the file open."""
    owner = _read(folder / NAME)
    here = owner.get("place") == _machine() and _lives(owner["pid"], owner["started"])
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
    """Return the file's fields; empty if it does not exist, or was not written by a run."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.lstat().st_size > MAX_BYTES:
            return {}
        written = read_record(path, AlignerError)
        written.integer("pid", low=1), written.integer("started"), written.text("id"), written.text("place")
        return written.fields
    except (OSError, AlignerError):
        return {}


def _own_record() -> dict[str, Any]:
    """Return this process's record. `attempt`: this start of the job, by Slurm and by the batch script; two steps of
    one start may run at a time."""
    return {
        "id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "place": _machine(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "attempt": [os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "ALIGNER_LOGS")],
        "time": time.strftime("%F %T"),
    }


class RunLock:
    """A lock of a folder: while entered, only this process uses it. Raises ConfigError if another process does, or if
    the folder cannot be written. `lost`: called in a thread, with the reason, if the file is gone or another
    process's."""

    def __init__(self, folder: Path, lost: Callable[[str], None] | None = None, beat_s: float = BEAT_S):
        self.folder, self.path, self.lost, self.beat_s = folder, folder / NAME, lost or _leave, beat_s
        self.record: dict[str, Any] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TextIO | None = None  # open as long as the folder is used: see `user_here`

    def __enter__(self) -> RunLock:
        self.record = _own_record()
        aside = self.folder / f".{NAME}.{self.record['id']}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(self.record), encoding="utf-8")
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
        if _read(self.path).get("id") == self.record["id"]:
            self.path.unlink(missing_ok=True)

    def _make(self, aside: Path) -> bool:
        """Try to make the file; complete from the first moment if the file system has hard links."""
        try:
            os.link(aside, self.path)
        except FileExistsError:
            return False
        except OSError:
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(self.record))
            except FileExistsError:
                return False
        return True

    def _follow(self, aside: Path) -> None:
        """Wait until the owner is certainly gone, and remove its file. Raises ConfigError if it lives."""
        owner, first, waited = _read(self.path), self._touched(), False
        while (why := self._gone(owner, aside)) is None:
            if first is None or self._touched() is None:
                return  # it has just ended
            if owner.get("place") == self.record["place"] or self._touched() != first:
                raise self._refusal(owner)
            if not waited:
                waited = True
                print(f"{self.path} belongs to {_named(owner)}: waiting for a heartbeat", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        self._take(owner, why)

    def _gone(self, owner: dict[str, Any], aside: Path) -> str | None:
        """Return why the owner is gone, None if it may live."""
        if owner.get("place") == self.record["place"]:
            lives = owner["pid"] != self.record["pid"] and _lives(owner["pid"], owner["started"])
            return None if lives else "which has ended"
        if owner.get("job") and owner["job"] == self.record["job"] and owner.get("attempt") != self.record["attempt"]:
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
        """Remove the file of `owner`. Of several processes, only the one that makes the claim may: later ones find
        another owner."""
        claim = self.folder / f".{NAME}.{owner.get('id', 'torn')}.claim"
        try:
            claim.open("x").close()
        except FileExistsError:
            if time.time() - claim.stat().st_mtime > STALE_S:  # of a process that died within these lines
                claim.unlink(missing_ok=True)
            time.sleep(0.05)
            return
        try:
            if _read(self.path) == owner:
                self.path.unlink(missing_ok=True)
                print(f"{self.path} belonged to {_named(owner)}, {why}: taking it over", file=sys.stderr, flush=True)
        finally:
            claim.unlink(missing_ok=True)

    def _refusal(self, owner: dict[str, Any]) -> ConfigError:
        hint = f"End that one, or choose another run.dir. If it is gone, delete {self.path}"
        expected = f"a folder that no other process uses; {_named(owner)} does since {owner.get('time', '?')}"
        return ConfigError("run.dir", str(self.folder), expected, hint)

    def _beat(self) -> None:
        try:
            why = self._until_lost()
        except BaseException as error:  # any error: nothing else keeps the file fresh
            why = f"{self.path}: its thread has ended by {type(error).__name__}: {error}"
        if why:
            self.lost(why)

    def _until_lost(self) -> str:
        """Return why the lock was lost; empty if the folder was left."""
        while not self._ended.wait(self.beat_s):
            try:
                owner = json.loads(self.path.read_text(encoding="utf-8"))
                if not isinstance(owner, dict) or owner.get("id") != self.record["id"]:
                    named = _named(owner if isinstance(owner, dict) else {})
                    return f"{self.path} belongs to {named} now: this run was silent for too long"
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
    """End the process, whose files would go to a folder that is another's or gone."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    failure.record(f"error: {why}", 1)
    os._exit(1)
