"""A rank that "trains" by counting to $STEPS, with the files and exit codes of a real run.

It begins as real ranks do: what the launcher ignored stays ignored until its own handlers stand, with nothing between.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    ask = os.environ.get
    run = Path(sys.argv[-1]).parent
    rank = int(ask("SLURM_PROCID", "0")) if "-m aligner run " in " ".join(sys.argv) else 0
    node, attempt = ask("SLURMD_NODENAME", ""), ask("ALIGNER_ATTEMPT", "")
    (run / "started").touch()
    time.sleep(float(ask("LISTEN_AFTER_S", "0")))
    stops = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stops.append(number))
    master = ask("MASTER_ADDR", "")
    print(f"rank {rank} of {ask('ALIGNER_RANKS', '')} attempt {attempt} node {node} master {master}", flush=True)
    (run / f"argv.{rank}").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in sys.argv[1:]))
    progress = run / "progress.json"
    first = step = json.loads(progress.read_text())["step"] if progress.exists() else 0
    if rank == 0:
        (run / "DONE").unlink(missing_ok=True)
    replace(run / f"pid.{node or 'here'}", f"{os.getpid()}\n", rank)
    while step < int(ask("STEPS", "3")):
        time.sleep(float(ask("STEP_S", "0.1")))
        step += 1
        if rank == 0 and not ask("STUCK"):
            replace(progress, json.dumps({"step": step}) + "\n", rank)
        if ask("FAIL_ON") in (node, f"rank{rank}"):
            code = int(ask("CODE", "1"))
            failure = {"time_s": 1, "text": "error: as asked", "exit_code": code}
            Path(os.environ["ALIGNER_FAILURE_FILE"]).write_text(json.dumps(failure) + "\n")
            return code
        if ask("PEER") and ask("ALIGNER_LOGS", "").endswith(".0") and gone(run / f"pid.{ask('PEER')}"):
            print('Traceback (most recent call last):\n  File "x"', file=sys.stderr)
            print("RuntimeError: [gloo/x] Connection closed by peer", file=sys.stderr)
            return 1
        if stops or (ask("STOP_AFTER") and step - first >= int(ask("STOP_AFTER", ""))):
            if rank == 0:
                (run / "STOPPED").touch()
            return 0
    if ask("CODE"):
        return int(ask("CODE", ""))
    if rank == 0:
        (run / "DONE").touch()
    return 0


def replace(path: Path, text: str, rank: int) -> None:
    """Write a small file whole."""
    beside = path.with_name(f"{path.name}.{rank}")
    beside.write_text(text)
    beside.replace(path)


def gone(pid_file: Path) -> bool:
    """Whether the peer is gone, as a collective notices; not in a restart, which may have no such peer."""
    if not pid_file.exists():
        return False
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
