"""A process of tools and environments, as its parent sees it: questions and their answers.

It has several open questions at a time. If it ends or is killed, the cause among the begun ones is unknown. With more
than one of them none is blamed, and each is asked again separately (`pool.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from aligner.answers import CAUSES
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.limits import LEFT, MAX_LINE
from aligner.errors import EnvironmentCodeError
from aligner.foreign import parse_json
from aligner.processes import guarded

START_S = 600.0  # for a worker's imports on a busy machine, which do not count for its first answer
GRACE_S = 5.0  # beyond environment.timeout_s, which a worker enforces unless something holds its interpreter
DRAIN_S = 1.0  # for the last output of an ended process, if another process holds its pipe open
KILL_S = 15.0  # for its guard to kill it and its children
_REPLY = re.compile(rb'\{"id": (\d+)')
_numbers = itertools.count()


class QuestionFailed(Exception):
    """A question that failed. blamed: this question was the cause. alone: repeat it while no other is open."""

    def __init__(self, cause: str, text: str, blamed: bool = True, alone: bool = False):
        super().__init__(text)
        self.cause, self.blamed, self.alone = cause, blamed, alone


@dataclass(eq=False)
class _Open:
    """An open question."""

    answer: asyncio.Future[dict[str, Any]]
    begun: bool = False


@dataclass(eq=False)
class Process(asyncio.SubprocessProtocol):
    cfg: EnvironmentConfig
    keys: set[str] = field(default_factory=set)  # of the environments that it holds
    over: tuple[str, str] | None = None  # cause and text; set: it takes no questions
    left: int = 0  # its abandoned threads
    _open: dict[int, _Open] = field(default_factory=dict)
    _unfinished: bytearray = field(default_factory=bytearray)  # the beginning of a line
    _warned: bool = False

    @classmethod
    async def start(cls, cfg: EnvironmentConfig, schemas: list[dict[str, Any]]) -> Process:
        command = guarded([sys.executable, "-P", "-m", "aligner.environments.worker"])
        path = os.pathsep.join(filter(None, sys.path))
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": None}
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        _, made = await asyncio.get_running_loop().subprocess_exec(lambda: cls(cfg), *command, **pipes, env=environ)
        made._send(asdict(cfg))
        made._send(schemas)
        return made

    @property
    def gone(self) -> bool:
        """Whether it takes no new question. Its last answers may still arrive."""
        return self.over is not None or self.ended.done()

    async def ask(self, question: dict[str, Any], limit_s: float) -> Any:
        """Return the answer to a question. Raises Failed."""
        if self.gone:
            raise QuestionFailed(*(self.over or ("died", self._end())), blamed=False)
        number, loop = next(_numbers), asyncio.get_running_loop()
        one = self._open[number] = _Open(loop.create_future())
        late = loop.call_later(limit_s + GRACE_S, self._late, limit_s)
        try:
            self._send(question | {"id": number})
            reply = await one.answer
        finally:
            late.cancel()
            self._open.pop(number, None)
        if "cause" in reply:
            raise QuestionFailed(reply["cause"], reply["text"])
        return reply["value"]

    def retire(self) -> bool:
        """Return whether it takes no further trajectories. It ends when its trajectories have ended."""
        if self.over is None and self.left > LEFT and not self.keys:
            self.stop("died", "ended: too many of its threads hang")
        return self.gone or self.left > LEFT

    def stop(self, cause: str, text: str) -> None:
        """Ask it nothing more, fail its open questions, and terminate it."""
        if self.over is not None:
            return
        self.over = cause, text
        suspects = [one for one in self._open.values() if one.begun] or list(self._open.values())
        for one in self._open.values():
            if not one.answer.done():
                alone = one in suspects
                one.answer.set_exception(QuestionFailed(cause, text, blamed=alone and len(suspects) == 1, alone=alone))
        self.terminate()
        if not self.ended.done():
            asyncio.get_running_loop().call_later(KILL_S, self.kill)

    def close(self) -> None:
        """Close its input, at which it ends its children and itself."""
        self.over = self.over or ("died", "the run has ended")
        self.transport.get_pipe_transport(0).close()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ended = asyncio.get_running_loop().create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        first, *rests = data.split(b"\n")
        self._unfinished += first
        for rest in rests:
            self._line(bytes(self._unfinished))
            self._unfinished = bytearray(rest)
        if len(self._unfinished) > MAX_LINE:
            self._unfinished.clear()
            self.stop("died", f"killed: expected answers of at most {MAX_LINE} bytes")

    def pipe_connection_lost(self, fd: int, error: Exception | None) -> None:
        if fd == 1:
            self._later("it closed its pipe of answers")

    def process_exited(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._later(self._end())

    def connection_lost(self, error: Exception | None) -> None:
        """Stop, after the process and its pipes have ended."""
        self.stop("died", self._end())

    def _later(self, text: str) -> None:
        """Stop after DRAIN_S, because its last answers may still arrive."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.stop, "died", text)

    def _end(self) -> str:
        return f"its process ended with exit code {self.transport.get_returncode()}"

    def _late(self, limit_s: float) -> None:
        self.stop("hung", f"no answer in {limit_s:g} s, and its process was killed")

    def terminate(self) -> None:
        """Let its guard kill it and its children."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self.transport.terminate()

    def kill(self) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self.transport.kill()

    def _line(self, line: bytes) -> None:
        """Read a line. Other programs may write to the pipe: an invalid line costs at most the answer that it
        spoilt."""
        match = _REPLY.search(line)
        one = self._open.get(int(match[1])) if match and len(match[1]) < 20 else None
        try:
            reply = parse_json(
                line[match.start() if match else 0 :], "an answer", EnvironmentCodeError, line=1, nan=True
            )
            if one is None or not _is_reply(reply):
                raise EnvironmentCodeError("an answer without a question")
        except EnvironmentCodeError as error:
            if one is not None:
                reply = {"cause": "raised", "text": str(error)}
            elif match is None:
                return self._warn(line)
            else:
                return  # its question has timed out
        if "begun" in reply:
            one.begun = True
            return
        self.left = reply.get("left", self.left)
        if not one.answer.done():
            one.answer.set_result(reply)

    def _warn(self, line: bytes) -> None:
        if not self._warned:
            self._warned = True
            text = f"warning: environment: ignored a line in the pipe that is not an answer: {line[:80]!r}"
            print(text, file=sys.stderr, flush=True)

    def _send(self, message: Any) -> None:
        self.transport.get_pipe_transport(0).write(f"{json.dumps(message)}\n".encode())


def _is_reply(reply: Any) -> bool:
    """Return whether it is {id, begun}, {id, value, left} or {id, cause, text, left}."""
    if not isinstance(reply, dict) or not isinstance(reply.get("left", 0), int):
        return False
    if "cause" in reply:
        return reply["cause"] in CAUSES and isinstance(reply.get("text"), str)
    return "value" in reply or reply.get("begun") is True
