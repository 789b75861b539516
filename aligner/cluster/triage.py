"""Cause of a job's failure: the earliest real failure over all rank logs. `slurm/triage
<run.dir>/logs/<job>.<attempt>`.

When one rank fails, the others report lost connections and time-outs of collectives; those are consequences. Standard
library only, of Python 3.7 or later: the host's own, where ranks have theirs in a container.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster import failure
from aligner.pipe import quiet_pipe

NO_CAUSE = 3  # exit code: nothing but consequences, or nothing at all
TAIL_LINES = 40
CONSEQUENCE = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|NCCL (?:error|communicator)|"
    r"ProcessGroup(?:NCCL|Gloo)|\[?[./\w-]*gloo/|TCPStore|[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|"
    r"Timed out waiting \d+ ?ms|[Ww]atchdog caught collective|heartbeat|recvBytes|sendBytes|BrokenPipeError|"
    r"ConnectionResetError|MPI_ABORT|mpi_errors_are_fatal"
)
TRACEBACK = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
CRASH = re.compile(
    r"Segmentation fault|Bus error|SIGSEGV|SIGBUS|SIGABRT|CUDA error|out of memory|No space left on device|"
    r"OMPI was not built with|Fatal error in (?:internal_|P)?MPI_Init"
)
PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")  # a cause, in the words of a lost connection
HEADER = re.compile(r"^\[rank-(\d+) on (\S+), pid")
# srun's message about a task that a signal ended
DEATH = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (?!Exited with|Terminated)(.+)")
EXITED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): Exited with exit code")


@dataclass(frozen=True)
class Finding:
    time_s: float
    rank: int
    node: str
    text: str
    exit_code: int | None = None  # the rank's own exit code, if it wrote one

    @property
    def consequence(self) -> bool:
        return consequence(self.text)


def consequence(text: str) -> bool:
    """Return whether a rank's last words (the exception itself) only report the others' absence."""
    last = "\n".join(text.strip().splitlines()[-3:])
    return CONSEQUENCE.search(last) is not None and PORT_TAKEN.search(last) is None


def findings(folder: Path) -> list[Finding]:
    """Return each rank's failure, by time. The time of a rank's note is exact; of a bare log it is that of its last
    line."""
    reported = []
    for log in sorted(folder.glob("rank-*.log")):
        text = _read(log)
        rank, node = _rank(log), "?"
        headers = [m for m in map(HEADER.match, text.splitlines()) if m]
        if headers:
            node = headers[-1][2]
        note = failure.read(folder / f"failure-{rank:04d}.json")
        if note:
            reported.append(Finding(note.time_s, rank, node, note.text, note.exit_code))
            continue
        words = last_words(text)
        if words:
            reported.append(Finding(log.stat().st_mtime, rank, node, words))
    return sorted(reported, key=lambda f: (f.time_s, f.rank))


def _rank(log: Path) -> int:
    return int(log.stem[len("rank-") :])


def _read(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def last_words(text: str) -> str:
    """Return the first traceback of a log with its exception, or the first line of a crash; empty if neither."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if TRACEBACK.match(line)]
    if starts:
        end = starts[0] + 1
        while end < len(lines) and re.match(r"^(?:\[rank\d+\]: ?)?\s", lines[end]):
            end += 1
        return "\n".join(lines[starts[0] : end + 1])
    crashes = [line for line in lines if CRASH.search(line)]
    return crashes[0] if crashes else ""


def killed(folder: Path) -> tuple[str, str, str] | None:
    """Return (node, ranks, how) of the first task that a signal ended, unless another had failed by itself before."""
    for line in _read(folder / "srun.log").splitlines():
        if EXITED.search(line):
            return None
        match = DEATH.search(line)
        if match:
            return match[1], _ranks(folder, match[1], match[2]), match[3]
    return None


def _exited(folder: Path) -> tuple[str, int] | None:
    """Return (node, rank) of the first task that ended with an exit code, by srun."""
    match = EXITED.search(_read(folder / "srun.log"))
    return (match[1], int(re.split(r"[,-]", _ranks(folder, match[1], match[2]))[0])) if match else None


def _ranks(folder: Path, node: str, tasks: str) -> str:
    """Return the ranks of srun's tasks on a node. It numbers those of each component of a heterogeneous job from 0;
    launchers/body.sh has recorded the size of the first one."""
    first = int(_read(folder / "trainers").strip() or 0)
    there = [_rank(log) for log in sorted(folder.glob("rank-*.log")) if f" on {node}, pid" in _read(log)]
    shift = first if there and there[0] >= first else 0
    return re.sub(r"\d+", lambda number: str(int(number[0]) + shift), tasks)


def explain(folder: Path) -> tuple[str, bool]:
    """Return the text to print, and whether it surely names the cause."""
    reported = findings(folder)
    real = [f for f in reported if not f.consequence]
    if real:
        first = real[0]
        head = f"rank {first.rank} on {first.node} failed first"
        others = len(reported) - 1
        head += f" ({others} more failed after it)" if others else ""
        tail = first.text.strip().splitlines()[-TAIL_LINES:]
        log = f"log: {folder / f'rank-{first.rank:04d}.log'}"
        return "\n".join([head, log, *(f"  | {line}" for line in tail)]), True  # the cause is the last line
    death = killed(folder)
    if death:
        node, ranks, how = death
        hint = " (out of memory on that node, or somebody's kill)" if "Killed" in how else ""
        return f"rank {ranks} on {node}: {how}{hint}; log: {folder / 'srun.log'}", False  # or the node died
    exited = _exited(folder)
    if exited and not reported:  # it ended without a traceback: only its last lines are known
        node, rank = exited
        log = folder / f"rank-{rank:04d}.log"
        tail = _read(log).strip().splitlines()[-15:]
        return "\n".join([f"rank {rank} on {node} ended first", f"log: {log}", *(f"  | {line}" for line in tail)]), True
    if reported:
        first = reported[0]
        last = first.text.strip().splitlines()[-1]
        ranks = ", ".join(str(f.rank) for f in reported)
        silent = {_rank(log) for log in folder.glob("rank-*.log")} - {f.rank for f in reported}
        if len(silent) == 1:
            hint = f"rank {silent.pop()} ended without a message (os._exit in one of your functions?): "
            return f"{hint}the others have lost it, first rank {first.rank} ({first.node}): {last}", False
        return f"ranks {ranks}: only lost connections, first on rank {first.rank} ({first.node}): {last}", False
    return f"no rank in {folder} wrote a cause", False


def meant(folder: Path, code: int) -> int:
    """Return the exit code of the attempt: that of the rank that failed first, as it wrote it, else `code`."""
    real = [f for f in findings(folder) if not f.consequence]
    return (real[0].exit_code if real else None) or code


def refused(folder: Path) -> str:
    """Return the error that a run's batch script found itself after the newest attempt or before it; empty if none."""
    return _read(folder / "logs" / "refused").strip()


def _newer(marker: Path, begun: Path) -> bool:
    """Return whether a marker is of the attempt that `begun` notes, or of whatever there is without one."""
    if not marker.is_file():
        return False
    return not begun.is_file() or marker.stat().st_mtime_ns > begun.stat().st_mtime_ns


def attempt_folder(folder: Path) -> Path:
    """Return the folder itself if it has rank logs, else the newest attempt of a run folder."""
    if any(folder.glob("rank-*.log")):
        return folder
    attempts = [log.parent for log in folder.glob("logs/*/rank-*.log")] + [
        log.parent for log in folder.glob("*/rank-*.log")
    ]
    return max(attempts, key=lambda attempt: attempt.stat().st_mtime, default=folder)


def main(argv: list[str]) -> int:
    if len(argv) == 3 and argv[0] == "--exit-code":  # of launchers/body.sh
        print(meant(Path(argv[2]), int(argv[1])))
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: slurm/triage RUN_DIR | LOG_FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    if not folder.is_dir():
        print(f"error: {argv[0]!r}: expected the folder of a run or of its logs", file=sys.stderr)
        return 2
    decided, attempt = refused(folder), attempt_folder(folder)
    for marker, meaning in (("DONE", "the run is finished"), ("STOPPED", "the run saved and stopped, and can resume")):
        if _newer(folder / marker, attempt / "started") and not decided:
            print(f"triage: {folder / marker}: {meaning}", flush=True)
            return 0
    text, cause = (f"the batch script: {decided}", True) if decided else explain(attempt)
    print(f"triage: {text}", flush=True)
    return 0 if cause else NO_CAUSE


if __name__ == "__main__":
    with quiet_pipe():
        sys.exit(main(sys.argv[1:]))
