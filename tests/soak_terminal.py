"""Runs of `tests.soak` in terminals: the toy tasks, and a random model whose words are read as commands, by calls or
by an agent in the sandbox."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aligner.data.dialogue
from aligner.data.tool_calls import Call
from aligner.environments.process import Process
from examples import terminal_tasks
from tests import stages

SHELL = "examples/terminal_tasks.py:Shell"
ENDED = "A process of environments was killed"
SETTINGS = [
    f"environment.path={SHELL}",
    "environment.max_turns=4",
    "environment.max_tokens=120",
    "environment.workers=1",
]
SETTINGS += ["environment.args={memory_mb: 128, disk_mb: 16, cpu_s: 5}", "environment.timeout_s=600"]
SETTINGS += ["model.init=random", "model.max_position=160", "sampling.max_response_tokens=6"]
SETTINGS += ["batch.prompts=2", "batch.group=4", "batch.micro_batch_samples=8", "data.max_prompt_tokens=32"]
PAGES = "engine.kv_cache_bytes=143360"  # of two rows at their longest
SETTINGS += [f"sampling.stop=[{','.join(stages.LETTERS[:26])}]"]
REPEATABLE = [
    "ls [0-9]* | wc -l > out",  # which solves the tasks that count
    "echo x >> f; wc -l < f",
    "n=$((n + 1)); echo $n; sleep 0.2",
    "sed -i s/old/1/ list; echo $?; cd ..",
    "i=0; while [ $i -lt 9999 ]; do i=$((i + 1)); done; echo $i",
    "sleep 9 & echo b; exit 3",
    "pwd; echo $RANDOM",
]
AGENT = Path(__file__).parent / "assets" / "sandboxed_agent.py"
OTHERS = ["date +%N", "head -c 2 /dev/urandom | od -An -tu1"]  # which no new terminal answers the same


def make_data(folder: Path) -> None:
    terminal_tasks.make_data(folder, 0)
    alone = [command for command in (*REPEATABLE, *OTHERS) if "&" not in command]  # the agent waits for processes
    (folder / "commands.json").write_text(json.dumps([*alone, "echo done"]))


def as_agent(data: Path) -> list[str]:
    """Return settings with which a program in the sandbox runs the commands."""
    commands = data / "commands.json"
    args = f"environment.args={{memory_mb: 128, disk_mb: 16, cpu_s: 5, readable: ['{AGENT}', '{commands}']}}"
    return [f"environment.agent='python3 {AGENT} {commands}'", args]


def overrides(data: Path, run: Path, *more: str) -> list[str]:
    return stages.overrides("grpo", data, run, *SETTINGS, *more)


def read(text: str, *_: object) -> tuple[str, list[Call]]:
    """Read a text as a command, by its checksum, or as an answer."""
    commands = [*REPEATABLE, *REPEATABLE, *OTHERS, None]
    command = commands[zlib.crc32(text.encode()) % len(commands)]
    return text, [Call("bash", {"command": command})] if command else []


def as_commands() -> Any:
    return patch.object(aligner.data.dialogue, "read_calls", read)


class RunningCall:
    """A point for kills: a call runs in a terminal. `begun` is reached with each."""

    @staticmethod
    def begun(process: Process) -> None:
        """Do nothing."""


def tell_begun() -> None:
    """Let `RunningCall.begun` be called when the process has begun a call."""
    original: Callable = Process._line

    def line(self: Process, text: bytes) -> None:
        original(self, text)
        if b'"begun"' in text:
            RunningCall.begun(self)

    Process._line = line  # type: ignore[method-assign]


def end(process: Process) -> None:
    """Kill the process of environments, as its memory's end would; the run goes on."""
    print(ENDED, flush=True)
    os.kill(process.transport.get_pid(), signal.SIGTERM)


class CountedShell(terminal_tasks.Shell):
    """A terminal that is counted, by lines of a file."""

    def __init__(self, starts: str, **limits: Any):
        super().__init__(**limits)
        self._starts = starts

    def reset(self, **row: Any) -> str | None:  # type: ignore[override]
        """Count, and begin."""
        with open(self._starts, "a") as file:
            file.write("start\n")
        return super().reset(**row)
