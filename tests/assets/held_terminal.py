"""Terminals of a Slurm job that ends in the middle of a trajectory, by its time limit."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import aligner.data.dialogue
from tests import soak_terminal

aligner.data.dialogue.read_calls = soak_terminal.read  # the words of a random model are commands,
soak_terminal.OTHERS = []  # which a new terminal answers the same


class HeldShell(soak_terminal.CountedShell):
    """In the second rollout no terminal returns from its third call, and the first one makes the time limit of the job
    a minute. In other jobs than the one that `starts`.held names they return."""

    def __init__(self, starts: str, rollout: int, **limits: Any):
        super().__init__(starts, **limits)
        self._rollout, self._calls = rollout, 0

    def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: Lines of bash.
        """
        text, self._calls = super().bash(command), self._calls + 1
        second = len(Path(self._starts).read_text().splitlines()) > self._rollout
        held, job = Path(f"{self._starts}.held"), os.environ.get("SLURM_JOB_ID")
        if second and self._calls == 3:
            if not held.exists():
                held.write_text(str(job))
                time.sleep(20)  # in which other calls end: the signals of the limit go to all processes
                subprocess.run(["scontrol", "update", f"JobId={job}", "TimeLimit=1"], check=True)
            if held.read_text() in ("", job):
                threading.Event().wait()
        return text
