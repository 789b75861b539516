"""N local ranks of one run: start them, pass signals on, and when one fails end the others and say why."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from aligner.cluster import failure
from aligner.cluster.env import LAUNCHED
from aligner.cluster.signals import CHOICES
from aligner.errors import ConfigError

POLL_S = 0.05
SETTLE_S = 0.5  # after the first failure, for the other ranks to write down theirs
KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
ASK_AGAIN_S = 5.0  # between two requests to stop: a rank that is still starting ignores them
REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)  # not HUP: without a terminal, a rank that does not catch it ends
TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen
    log: Path | None  # None: the terminal
    failure_file: Path


def launch(cfg_path: Path, ranks: int, run_dir: Path, *, threads: int = 0, argv: Sequence[str] | None = None) -> int:
    """Run `python -m aligner run --frozen cfg_path` (or `argv`) as `ranks` processes; returns the exit code.

    `threads` is OMP_NUM_THREADS of each rank; 0 shares the cores out.
    Rank 0 writes to this terminal, the others to run_dir/logs/rank-0001.log and so on. The code is 0 if all ranks
    ended well, else that of the rank that failed first (128 + n if signal n ended it).
    """
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
        with _signals_forwarded(started) as received:
            try:
                shared = {
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads or max(1, len(os.sched_getaffinity(0)) // ranks)),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(_free_port()),
                    LAUNCHED: "1",
                }
                for number in range(ranks):
                    started.append(_start(number, command, shared, logs, files))
                first = _watch(started, received)
            finally:
                _end(started)
    if first is None:
        return 0
    if received:
        print(f"stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
    else:
        _explain(first, ranks)
    return _exit_code(first)


def _start(number: int, command: list[str], shared: dict[str, str], logs: Path, files: ExitStack) -> _Rank:
    log = logs / f"rank-{number:04d}.log" if number else None
    failure_file = logs / f"failure-{number:04d}.json"
    failure_file.unlink(missing_ok=True)
    output = files.enter_context(log.open("ab")) if log else None
    numbers = {"RANK": str(number), "LOCAL_RANK": str(number), failure.VARIABLE: str(failure_file)}
    process = subprocess.Popen(
        command,
        env={**shared, **numbers},
        stdout=output,
        stderr=output,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a Ctrl-C reaches the ranks once, through us, not a second time from the terminal
        preexec_fn=_prepare_rank,
    )
    return _Rank(number, process, log, failure_file)


def _prepare_rank() -> None:
    """Ask Linux for SIGKILL when the launcher dies, so that killing it leaves no ranks behind: at SIGTERM they would
    first finish their step and save. A request to stop does not end a rank that does not listen yet: it is repeated."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _watch(ranks: list[_Rank], received: list[int]) -> _Rank | None:
    """Wait for all ranks, or for the first failure; returns the rank that failed first."""
    asked = time.monotonic()
    while True:
        if time.monotonic() - asked > ASK_AGAIN_S:
            asked = time.monotonic()
            for number in set(received).intersection(REQUESTS):
                _send(ranks, number)
        codes = [r.process.poll() for r in ranks]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_S)
    exited_first = next(r for r in ranks if r.process.returncode)
    killed = next((r for r in ranks if r.process.returncode == -signal.SIGKILL), None)
    if killed is not None:
        return killed  # it could not say anything: what others say is that they have lost it
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and any(r.process.poll() is None for r in ranks):
        time.sleep(POLL_S)
    told = [(said.time_s, r.number) for r in ranks if (said := failure.read(r.failure_file))]
    return ranks[min(told)[1]] if told else exited_first


def _end(ranks: list[_Rank]) -> None:
    """SIGTERM, then SIGKILL for those that do not listen."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + KILL_AFTER_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _exit_code(rank: _Rank) -> int:
    """A rank that said why it fails but was still ending when we ended it counts with the code it meant."""
    code, said = rank.process.returncode, failure.read(rank.failure_file)
    if code < 0 and said:
        return said.exit_code
    return code if code >= 0 else 128 - code


def _explain(rank: _Rank, ranks: int) -> None:
    code = rank.process.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    print(f"rank {rank.number} of {ranks} failed first ({how})", file=sys.stderr)
    said = failure.read(rank.failure_file)
    if said is None:
        text = rank.log.read_text(errors="replace") if rank.log else ""
        lines = text.strip().splitlines()[-TAIL_LINES:]
    else:  # rank 0 has said it on this terminal
        lines = said.text.strip().splitlines() if rank.number else []
    for line in lines:
        print(f"  | {line}", file=sys.stderr)
    if rank.log:
        print(f"log: {rank.log}", file=sys.stderr)
    sys.stderr.flush()


def _send(ranks: list[_Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


@contextmanager
def _signals_forwarded(ranks: list[_Rank]) -> Iterator[list[int]]:
    """Pass SIGINT, SIGTERM and the signals that ask for a stop on to every rank. They may take their time to save; a
    second SIGINT ends them.

    Yields the list of signals that came.
    """
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        _send(ranks, number)

    forwarded = (signal.SIGINT, signal.SIGTERM, *(signal.Signals[f"SIG{name}"] for name in CHOICES))
    before = {number: signal.signal(number, forward) for number in forwarded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
