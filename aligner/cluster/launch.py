"""N local ranks of one run: start them and forward signals. When one fails, end the others and print the cause."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from aligner.cluster import failure, fork_server, seal
from aligner.cluster.env import LAUNCHED
from aligner.cluster.mpi import free_port
from aligner.cluster.signals import AGAIN, CHOICES, catchable
from aligner.cluster.triage import consequence
from aligner.errors import ConfigError
from aligner.pipe import CLOSED, output_closed

POLL_S = 0.05
SETTLE_S = 0.5  # after the first failure, for the other ranks to write down theirs
KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
ASK_AGAIN_S = 5.0  # between two requests to stop: a rank that is still starting ignores them
REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)  # not HUP: without a terminal, a rank that does not catch it ends
STOPS = (*REQUESTS, signal.SIGTERM)  # to ranks that listen
TAIL_LINES = 30


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen | fork_server.Child
    log: Path | None  # None: the terminal
    failure_file: Path


def launch(
    cfg_path: Path,
    ranks: int,
    run_dir: Path,
    *,
    threads: int = 0,
    argv: Sequence[str] | None = None,
    imports: Sequence[str] = (),
    proof: Sequence[Path] = (),
    last: bool = False,
) -> int:
    """Run `python -m aligner run --frozen cfg_path` (or `argv`) as `ranks` processes; return the exit code.

    `threads` is OMP_NUM_THREADS of each rank; 0 divides the cores. `imports`: modules that ranks need, which one
    process imports for all; it takes an `argv` of a Python's `-m MODULE`. Rank 0 writes to this terminal, the others to
    run_dir/logs/rank-0001.log and so on. The code is 0 if all ranks ended well, else that of the rank that failed first
    (128 + n if signal n ended it). `proof`: ranks listen to requests to stop and write one of these files before they
    end well; without it, 0 is a failure. `last`: as in StopSignals."""
    if ranks < 1:
        raise ConfigError("--ranks", ranks, "a number >= 1")
    command = list(argv) if argv is not None else [sys.executable, "-m", "aligner", "run", "--frozen", str(cfg_path)]
    logs = Path(run_dir) / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("run.dir", str(run_dir), "a folder that can be written", f"{error.strerror}.") from None
    if ranks > 1:
        print(f"{ranks} ranks; the output of rank 1 and up is in {logs}/rank-*.log", file=sys.stderr, flush=True)
    with ExitStack() as files:
        started: list[_Rank] = []
        requests = STOPS if proof else REQUESTS
        before = _marks(proof)
        with signals_forwarded(lambda number: _ask(started, number), last) as received:
            try:
                shared = _environment(ranks, threads)
                if imports:
                    _fork(started, ranks, command, imports, shared, logs, requests, received)
                else:
                    for number in range(ranks):
                        started.append(_start(number, command, shared, logs, files, requests))
                proven = lambda: not proof or _new(proof, before)  # noqa: E731
                first = _watch(started, received, requests, proven)
            except KeyboardInterrupt:  # the second Ctrl-C
                _send(started, signal.SIGKILL)
                raise
            finally:
                _end(started)
    if first is None:
        return 0
    code = _exit_code(first)
    if code == CLOSED and output_closed():
        return code
    if code - 128 in received:
        print(f"stopped by {signal.Signals(code - 128).name}", file=sys.stderr)
    else:
        _explain(first, ranks)
    return code


def _environment(ranks: int, threads: int) -> dict[str, str]:
    """Return the environment that all ranks share."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads or max(1, len(os.sched_getaffinity(0)) // ranks)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        # below the ephemeral range, so that no outgoing connection takes it before rank 0 listens
        "MASTER_PORT": str(free_port(random.SystemRandom().randrange(20000, 30000))),
        LAUNCHED: "1",
        seal.VARIABLE: seal.new_secret(),
    }


def _marks(proof: Sequence[Path]) -> list[tuple[int, int] | None]:
    """Return inodes and times, which tell a file of this start from one of an earlier start."""
    return [(path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None for path in proof]


def _new(proof: Sequence[Path], before: list[tuple[int, int] | None]) -> bool:
    return any(now and now != then for now, then in zip(_marks(proof), before, strict=True))


def _start(
    number: int, command: list[str], shared: dict[str, str], logs: Path, files: ExitStack, requests: Sequence[int]
) -> _Rank:
    environ, log, failure_file = _own(number, shared, logs)
    output = files.enter_context(log.open("ab")) if log else None
    process = subprocess.Popen(
        command,
        env=environ,
        stdout=output,
        stderr=output,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a Ctrl-C reaches the ranks once, through us, not a second time from the terminal
        preexec_fn=lambda: fork_server.prepare(requests),
    )
    return _Rank(number, process, log, failure_file)


def _own(number: int, shared: dict[str, str], logs: Path) -> tuple[dict[str, str], Path | None, Path]:
    """Return a rank's environment, its log, and the file for its failure."""
    failure_file = logs / f"failure-{number:04d}.json"
    failure_file.unlink(missing_ok=True)
    numbers = {"RANK": str(number), "LOCAL_RANK": str(number), failure.VARIABLE: str(failure_file)}
    return {**shared, **numbers}, logs / f"rank-{number:04d}.log" if number else None, failure_file


def _fork(
    started: list[_Rank],
    ranks: int,
    command: list[str],
    imports: Sequence[str],
    shared: dict[str, str],
    logs: Path,
    requests: Sequence[int],
    received: list[int],
) -> None:
    """Start all ranks like `_start`, by forks. The fork server stands for rank 0 until they exist."""
    owns = [_own(number, shared, logs) for number in range(ranks)]
    with fork_server.lent(imports, shared, requests) as server:
        started.append(_Rank(0, server.process, *owns[0][1:]))
        try:
            children = server.children(command, [own[:2] for own in owns])
        except (EOFError, ConnectionError):  # its output has the reason
            server.process.wait()
            return
        forked = [
            _Rank(number, child, *own[1:]) for number, (child, own) in enumerate(zip(children, owns, strict=True))
        ]
        missed, started[:] = [*received], forked  # no call between: a signal's handler runs before both, or after
        for number in missed:
            _send(started, number)


def _watch(
    ranks: list[_Rank], received: list[int], requests: Sequence[int], proven: Callable[[], bool]
) -> _Rank | None:
    """Wait for all ranks, or for the first failure; return the rank that failed first."""
    asked = time.monotonic()
    left: _Rank | None = None  # the first rank with exit code 0 though nothing was `proven`
    while True:
        codes = [rank.process.poll() for rank in ranks]  # before their files are read
        if time.monotonic() - asked > ASK_AGAIN_S:
            asked = time.monotonic()
            for number in set(received).intersection(requests):
                _send(ranks, number)
        if left is None and 0 in codes and not proven():
            left = ranks[codes.index(0)]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return None if left is None or proven() else left
        time.sleep(POLL_S)
    exited_first = next(r for r in ranks if r.process.returncode)
    if killed := _killed(ranks):
        return killed  # it could not write a failure: the others only report that they have lost it
    failed = time.monotonic()
    while any(r.process.poll() is None for r in ranks):
        reports = _failures(ranks)
        lost = reports and all(lost for lost, *_ in reports)  # the rank that they have lost may still be ending
        if time.monotonic() - failed > (KILL_AFTER_S if lost else SETTLE_S):
            break
        time.sleep(POLL_S)
    reports = _failures(ranks)
    causes = [report for report in reports if not report[0]]
    if not causes and (killed := _killed(ranks)):  # the ranks that had lost it ended sooner
        return killed
    if left is not None and not causes and not proven():  # it left, and the others have lost it
        return left
    return ranks[min(causes or reports)[2]] if reports else exited_first


def _killed(ranks: list[_Rank]) -> _Rank | None:
    return next((r for r in ranks if r.process.poll() == -signal.SIGKILL), None)


def _await_end(ranks: list[_Rank]) -> None:
    """Wait for the ranks' end, at most KILL_AFTER_S."""
    deadline = time.monotonic() + KILL_AFTER_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _failures(ranks: list[_Rank]) -> list[tuple[bool, float, int]]:
    """Return (whether it only reports lost connections, time, rank) of the ranks that wrote their failure."""
    notes = [(failure.read(rank.failure_file), rank.number) for rank in ranks]
    return [(consequence(note.text), note.time_s, number) for note, number in notes if note]


def _end(ranks: list[_Rank]) -> None:
    """Send SIGTERM, then SIGKILL to ranks that do not end."""
    _send(ranks, signal.SIGTERM)
    _await_end(ranks)
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _exit_code(rank: _Rank) -> int:
    """Return the rank's exit code. A rank that wrote its failure but was still ending when we ended it counts with its
    own code."""
    code, note = rank.process.returncode, failure.read(rank.failure_file)
    if code < 0 and note:
        return note.exit_code
    return (code or 1) if code >= 0 else 128 - code


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _explain(rank: _Rank, ranks: int) -> None:
    code = rank.process.returncode
    cause = f"rank {rank.number} of {ranks} failed first ({_how(code)})"
    if code == 0:
        cause += ": it left without DONE or STOPPED. One of your functions, or a library, ended the process (os._exit)"
    note = failure.read(rank.failure_file)
    if note is None:
        text = rank.log.read_text(errors="replace") if rank.log else ""
        lines = text.strip().splitlines()[-TAIL_LINES:]
    else:  # rank 0 has printed it on this terminal
        lines = note.text.strip().splitlines()
        cause += f": {lines[-1]}" if lines else ""
        lines = lines if rank.number else []
    for line in lines:
        print(f"  | {line}", file=sys.stderr)
    if rank.log:
        print(f"log: {rank.log}", file=sys.stderr)
    print(cause, file=sys.stderr, flush=True)


def run_one(command: Sequence[str]) -> tuple[int, list[int]]:
    """Run a command, forwarding signals to it. Return its exit code (128 + n if signal n ended it) and the signals."""
    child: list[subprocess.Popen] = []
    with signals_forwarded(lambda number: [process.send_signal(number) for process in child]) as received:
        child.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0))
        try:
            code = child[0].wait()
            return code if code >= 0 else 128 - code, received
        except KeyboardInterrupt:  # the second Ctrl-C
            child[0].kill()
            raise


def _ask(ranks: list[_Rank], number: int) -> None:
    if number == signal.SIGINT:
        os.write(2, AGAIN)
    _send(ranks, number)


def _send(ranks: list[_Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


@contextmanager
def signals_forwarded(send: Callable[[int], None], last: bool = False) -> Iterator[list[int]]:
    """Forward SIGINT, SIGTERM and the signals that ask for a stop. The receiver may take time to save; the second
    SIGINT is a KeyboardInterrupt here. `last`: as in StopSignals.

    Yields the list of received signals."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        send(number)

    forwarded = (signal.SIGINT, signal.SIGTERM, *(signal.Signals[f"SIG{name}"] for name in CHOICES))
    before = {number: signal.signal(number, forward) for number in forwarded if catchable(number)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last and number != signal.SIGINT else handler)
