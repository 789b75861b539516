"""A process of tools and environments, as its parent sees it: questions, and how each of them ends.

Several are asked at a time. Where the process ends, or has to be killed, nobody knows which of those that it had begun
was the cause: with more than one of them none is blamed, and all are asked again where nothing else is (`pool.py`).
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

START_S = 600.0  # of a worker: its imports on a busy machine, which are not of its first answer's time
GRACE_S = 5.0  # beyond environment.timeout_s, which a worker keeps by itself unless something holds its interpreter
DRAIN_S = 1.0  # for what an ended process has said to arrive, where something else holds its pipe open
KILL_S = 15.0  # for its guard to kill it and all that it has started
_REPLY = re.compile(rb'\{"id": (\d+)')
_numbers = itertools.count()


class Failed(Exception):
    """blamed: it was this question's own fault. alone: it is to be asked again where no other is."""

    def __init__(self, cause: str, text: str, blamed: bool = True, alone: bool = False):
        super().__init__(text)
        self.cause, self.blamed, self.alone = cause, blamed, alone


@dataclass(eq=False)
class _Open:
    """A question that waits for its answer."""

    answer: asyncio.Future[dict[str, Any]]
    begun: bool = False


@dataclass(eq=False)
class Process(asyncio.SubprocessProtocol):
    cfg: EnvironmentConfig
    keys: set[str] = field(default_factory=set)  # of the environments that it holds
    over: tuple[str, str] | None = None  # cause and text: it is asked nothing any more
    left: int = 0  # its threads that nobody waits for
    _open: dict[int, _Open] = field(default_factory=dict)
    _part: bytearray = field(default_factory=bytearray)  # of a line
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
        """Whether it answers no new question. What it has said before its end may still be on its way."""
        return self.over is not None or self.ended.done()

    async def ask(self, question: dict[str, Any], limit_s: float) -> Any:
        """Raises Failed."""
        if self.gone:
            raise Failed(*(self.over or ("died", self._end())), blamed=False)
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
            raise Failed(reply["cause"], reply["text"])
        return reply["value"]

    def retire(self) -> bool:
        """Whether it takes no further trajectories. It ends with those that it has."""
        if self.over is None and self.left > LEFT and not self.keys:
            self.stop("died", "it was ended: too many of its threads hang")
        return self.gone or self.left > LEFT

    def stop(self, cause: str, text: str) -> None:
        """Nothing is asked of it any more."""
        if self.over is not None:
            return
        self.over = cause, text
        suspects = [one for one in self._open.values() if one.begun] or list(self._open.values())
        for one in self._open.values():
            if not one.answer.done():
                alone = one in suspects
                one.answer.set_exception(Failed(cause, text, blamed=alone and len(suspects) == 1, alone=alone))
        self.terminate()
        if not self.ended.done():
            asyncio.get_running_loop().call_later(KILL_S, self.kill)

    def close(self) -> None:
        """It then ends what it has started, and itself."""
        self.over = self.over or ("died", "the run has ended")
        self.transport.get_pipe_transport(0).close()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ended = asyncio.get_running_loop().create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._part += first
        for part in others:
            self._line(bytes(self._part))
            self._part = bytearray(part)
        if len(self._part) > MAX_LINE:
            self._part.clear()
            self.stop("died", f"it was killed: expected answers of at most {MAX_LINE} bytes")

    def pipe_connection_lost(self, fd: int, error: Exception | None) -> None:
        if fd == 1:
            self._later("it closed its pipe of answers")

    def process_exited(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._later(self._end())

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and its pipes have."""
        self.stop("died", self._end())

    def _later(self, text: str) -> None:
        """What it has said may still be on its way."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.stop, "died", text)

    def _end(self) -> str:
        return f"its process ended with exit code {self.transport.get_returncode()}"

    def _late(self, limit_s: float) -> None:
        self.stop("hung", f"no answer in {limit_s:g} s, and its process was killed")

    def terminate(self) -> None:
        """Its guard kills it, and all that it has started."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self.transport.terminate()

    def kill(self) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self.transport.kill()

    def _line(self, line: bytes) -> None:
        """Something else may have written to the pipe; what is no answer costs at most the one that it has spoilt."""
        match = _REPLY.search(line)
        one = self._open.get(int(match[1])) if match and len(match[1]) < 20 else None
        try:
            reply = parse_json(
                line[match.start() if match else 0 :], "an answer", EnvironmentCodeError, line=1, nan=True
            )
            if one is None or not _is_reply(reply):
                raise EnvironmentCodeError("an answer to no question")
        except EnvironmentCodeError as error:
            if one is not None:
                reply = {"cause": "raised", "text": str(error)}
            elif match is None:
                return self._warn(line)
            else:
                return  # to a question that nobody waits for
        if "begun" in reply:
            one.begun = True
            return
        self.left = reply.get("left", self.left)
        if not one.answer.done():
            one.answer.set_result(reply)

    def _warn(self, line: bytes) -> None:
        if not self._warned:
            self._warned = True
            text = (
                f"warning: environment: a line that is no answer is passed over, from whatever writes it: {line[:80]!r}"
            )
            print(text, file=sys.stderr, flush=True)

    def _send(self, message: Any) -> None:
        self.transport.get_pipe_transport(0).write(f"{json.dumps(message)}\n".encode())


def _is_reply(reply: Any) -> bool:
    """{id, begun}, {id, value, left} or {id, cause, text, left}."""
    if not isinstance(reply, dict) or not isinstance(reply.get("left", 0), int):
        return False
    if "cause" in reply:
        return reply["cause"] in CAUSES and isinstance(reply.get("text"), str)
    return "value" in reply or reply.get("begun") is True
