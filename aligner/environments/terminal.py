"""A terminal for each trajectory: `environment.path=aligner.environments.terminal:Terminal`.

The model has a shell, a Python and files in a sandbox of its own (aligner/sandbox/terminal.py). At the end its work is
tested there, with the processes of the agent gone and the system's folders as before. With `environment.agent` a
command line is the agent: it runs in the sandbox, and queries the model from there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from socket import socket
from typing import Any

from aligner.environments.task_folders import TaskFolder, read_task
from aligner.errors import EnvironmentCodeError, SandboxError
from aligner.foreign import parse_json
from aligner.sandbox.images import unpacked
from aligner.sandbox.proxy import PORT, HostList, Proxy
from aligner.sandbox.terminal import TerminalLimits, TerminalSandbox, lacks

TEST = "/tests/test.sh"
ERROR = "error: "  # by which a worker counts calls that failed
INPUT, AGENT_PORT = "/run/agent.json", 3129  # of an agent's program: its input, and where it reaches the model
AGENT_WAITS_S = 1e6  # for the model: environment.timeout_s bounds an agent's time between its requests
REWARDS = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"  # the first one counts, as in Harbor
# a test imports neither what lies in the folder of the work nor what the agent has installed for its user
CLEAN = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": "/tests", "PYTHONDONTWRITEBYTECODE": "1"}
OPEN, AT = (PORT,), f"http://127.0.0.1:{PORT}"
VARIABLES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), AT)
VARIABLES |= dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1")
# calls at a time in this process: more would wait for each other's processors
_TURN = threading.BoundedSemaphore(2 * len(os.sched_getaffinity(0)))


class Terminal:
    """A terminal over an image (aligner/sandbox/images.py); "": the programs of this machine.

    memory_mb, processes, disk_mb: of the sandbox. cpu_s, waits_s: of a call. test_s: CPU seconds of the tests.
    output_chars: of a call's text, whose middle is cut. folder: the working directory. hosts: that it reaches by HTTP.
    readable: files and folders of this machine that are seen, too, but by no test.
    """

    listens = False  # set for an agent's program, before `reset`

    def __init__(
        self,
        image: str = "",
        folder: str = "/app",
        test_s: float = 60.0,
        hosts: Sequence[str] = (),
        readable: Sequence[str] = (),
        **limits: Any,
    ):
        self._readable = [os.path.abspath(path) for path in ([readable] if isinstance(readable, str) else readable)]
        self._hosts = HostList(hosts) if hosts else None
        self._limits, self._image, self._folder, self._test_s = TerminalLimits(**limits), image, folder, test_s
        self._sandbox: TerminalSandbox | None = None

    @classmethod
    def check(cls, **args: Any) -> None:
        """Raise TypeError or an error of the project if there are no such terminals on this machine."""
        made = cls(**args)
        if missing := [path for path in made._readable if not os.path.exists(path)]:
            raise SandboxError(f"readable={missing[0]}: expected a file or folder of this machine")
        if made._image:
            unpacked(made._image)
        if why := lacks():
            raise SandboxError(why)

    @classmethod
    def most_mb(cls, **args: Any) -> int:
        """Return the MiB of memory that the programs and the files of one may take."""
        limits = cls(**args)._limits
        return limits.memory_mb + limits.disk_mb

    def reset(
        self,
        seed: int,
        task: str = "",
        instruction: str = "",
        files: Mapping[str, str] | None = None,
        setup: str = "",
        tests: str | Mapping[str, str] | None = None,
    ) -> str | None:
        """Make the sandbox of a task: a folder, or the other columns.

        setup: bash before the model's first call. tests: bash, or files of which one is test.sh.
        """
        own = {"test.sh": tests} if isinstance(tests, str) and tests else _texts(tests)
        self._task = read_task(task) if task else TaskFolder(instruction, _texts(files), own)
        if "test.sh" not in self._task.tests and type(self).get_reward is Terminal.get_reward:
            raise ValueError("a row has neither `task` nor `tests`: expected a test, by which its reward is decided")
        image = self._task.image or self._image
        with _TURN:
            folder, ports = self._task.folder or self._folder, (AGENT_PORT,) if self.listens else ()
            self._sandbox = open_sandbox(self._limits, image, folder, self._hosts, ports, self._readable)
            self._end = weakref.finalize(self, self._sandbox.close)
            if self._task.files:
                expect_done(self._sandbox.write(self._task.files), "files")
            if setup:
                expect_done(self._sandbox.run(["bash", "-c", setup], self._test_s, {}), "setup")
        return self._task.instruction or None

    def bash(self, command: str) -> str:
        """Run a command in the shell, which keeps its folder and variables.

        Args:
            command: Lines of bash.
        """
        return self._text(self._open.bash, command)

    def python(self, code: str) -> str:
        """Run code in a Python interpreter, which keeps its variables, and show the value of the last expression.

        Args:
            code: Lines of Python.
        """
        return self._text(self._open.python, code)

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: The file.
            old: The text to replace.
            new: The text that replaces it.
        """
        return self._text(self._open.edit, path, old, new) or f"edited {path}"

    def write(self, path: str, text: str) -> str:
        """Write a file, with the folders that it needs.

        Args:
            path: The file.
            text: All of its contents.
        """
        return self._text(self._open.write, {path: text}) or f"wrote {path}"

    def get_reward(self) -> float | None:
        """Run the tests. Return `reward` of their reward.json, else the number in their reward.txt, else 1 if they exit
        with 0, else 0. Raises EnvironmentCodeError for another reward.json."""
        sandbox = self._open
        with _TURN:
            sandbox.renew()
            files = {f"/tests/{name}": text for name, text in self._task.tests.items()}
            expect_done(sandbox.write(files | {f"{os.path.dirname(REWARDS[0])}/.keep": ""}), "tests")
            seconds = self._task.test_s or self._test_s
            result = sandbox.run(["bash", TEST], seconds, CLEAN | dict(self._task.environ))
            fields, text = map(sandbox.read, REWARDS)
        self._end()
        if result["why"] or (fields is None and text is None):
            return float(result["status"] == 0)
        return _number(text or "") if fields is None else _reward_in(fields)

    @property
    def listener(self) -> socket:
        """A socket for what an agent's program connects to."""
        return self._open.listeners[-1]

    def run_agent(self, command: Sequence[str], data: bytes, environ: Mapping[str, str], turns: int) -> dict[str, Any]:
        """Run an agent's program with `data` as its input, while it computes for less than `cpu_s` in each of so many
        turns. Return {out, status, why}: its output, exit status, and which limit ended it."""
        sandbox = self._open
        expect_done(sandbox.write({INPUT: data}), "input")
        with_input = ["bash", "-c", f'exec "$@" < {INPUT}', "agent", *command]
        return sandbox.run(with_input, self._limits.cpu_s * turns, environ, AGENT_WAITS_S)

    def end_agent(self) -> None:
        """End all processes at once, while `run_agent` may run in another thread."""
        if self._sandbox is not None:
            self._sandbox.kill()

    @property
    def _open(self) -> TerminalSandbox:
        assert self._sandbox is not None
        return self._sandbox

    def _text(self, ask: Any, *arguments: Any) -> str:
        with _TURN:
            answer = ask(*arguments)
        text = answer["out"].removesuffix("\n")
        end = f"({answer['why']})" if answer["why"] else ""
        if not end and answer["status"] and not text.startswith(ERROR):
            end = f"(exit status {answer['status']})"
        return "\n".join(line for line in (text, end) if line)


def open_sandbox(
    limits: TerminalLimits,
    image: str,
    folder: str,
    hosts: HostList | None,
    ports: Sequence[int] = (),
    readable: Sequence[str] = (),
) -> TerminalSandbox:
    """Make a sandbox over an image, with a proxy to these hosts if there are any. `ports` are the last of its
    `listeners`."""
    proxied, variables = (OPEN, VARIABLES) if hosts else ((), {})
    below = unpacked(image) if image else ""
    sandbox = TerminalSandbox(limits, below, folder, (*proxied, *ports), variables, readable)
    if hosts:
        try:
            Proxy(sandbox.listeners[0], hosts)
        except BaseException:
            sandbox.close()
            raise
    return sandbox


def _texts(files: Any) -> dict[str, str]:
    """Return files by names. A table that has a column for each name of any row has None for those of others."""
    return {name: text for name, text in dict(files or {}).items() if text is not None}


def expect_done(answer: dict[str, Any], what: str) -> None:
    if answer["status"] != 0:
        raise RuntimeError(f"{what}: {answer['out'][-500:]}{answer['why']} (exit status {answer['status']})")


def _reward_in(text: str) -> float:
    """Return `reward` of a JSON object."""
    fields = parse_json(text, REWARDS[0], EnvironmentCodeError, nan=True)
    reward = fields.get("reward") if isinstance(fields, dict) else None
    if not isinstance(reward, int | float):
        raise EnvironmentCodeError(
            f"{REWARDS[0]}: expected an object with a number `reward`, found {text.strip():.200}"
        )
    return _number(str(float(reward)))


def _number(text: str) -> float:
    """Return a reward; 0 for what is no finite number."""
    try:
        value = float(text.strip() or "nan")
    except ValueError:
        return 0.0
    return value if abs(value) < float("inf") else 0.0
