"""A process of tools and environments: JSON lines {id, op, key, ...} in, {id, value} or {id, cause, text} out.

Requests of one trajectory (`key`) come one after the other, those of several at a time: coroutines share one loop,
other functions have a thread each. {id, begun} reports that user code runs for a request. A call that exceeds the time
limit is abandoned, and {left} counts abandoned threads. The parent kills a process whose thread holds the interpreter.
The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aligner.config.options import from_plain
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.limits import CHARS, MAX_LINE, MAX_WORDS
from aligner.environments.tools import Tools, load_tools, misfit
from aligner.processes import leave_requests_to_rank

THREADS = 1024
QUIET = ("ready", "forget")  # no user code runs for them
MODELS_FAULT = (ValueError, ArithmeticError)  # of a tool: the text goes to the model; any other exception is a failure


class ToolWorker:
    def __init__(self, cfg: EnvironmentConfig, tools: Tools, schemas: dict[str, Any]):
        self.cfg, self.tools, self.schemas, self.threads = cfg, tools, schemas, Threads()
        self.objects: dict[str, Any] = {}  # environments by trajectory

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        work = asyncio.create_task(_settled(getattr(self, f"_{request['op']}")(request)))
        await asyncio.wait((work,), timeout=self.cfg.timeout_s)
        if not work.done():
            work.cancel()  # a thread ignores it
            cause, text = "hung", f"no answer in {self.cfg.timeout_s:g} s"
        elif work.cancelled():
            cause, text = "raised", "CancelledError"
        else:
            value, text = work.result()
            if not text:
                return {"id": request["id"], "value": value, "left": self.threads.left}
            cause = "raised"  # logged, counted and retried
        await self._forget(request)  # in another environment
        return {"id": request["id"], "cause": cause, "text": text, "left": self.threads.left}

    async def _ready(self, request: dict[str, Any]) -> None:
        """Answer when the inputs are read."""

    async def _reset(self, request: dict[str, Any]) -> Any:
        """Return the text or the messages with which an environment opens."""
        if self.tools.kind is None:
            return []
        environment = self.objects[request["key"]] = await self._called(self.tools.kind, **self.cfg.args)
        return await self._opening(environment, request["seed"], request["row"])

    async def _opening(self, environment: Any, seed: int, row: dict[str, Any]) -> str | list[dict[str, Any]]:
        row = {"seed": seed} | {k: v for k, v in row.items() if k != "seed"}
        taken = inspect.signature(environment.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            row = {name: value for name, value in row.items() if name in taken}
        opening = await self._called(environment.reset, **row)
        messages = isinstance(opening, list) and all(map(_is_message, opening))
        if not (opening is None or isinstance(opening, str) or messages):
            raise TypeError(f"reset returned {opening!r:.200}: expected None, a text or a list of {{role, content}}")
        return opening or []

    async def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the result of each call as text, the turn's reward, and whether the environment is done."""
        environment = self.objects.get(request["key"])
        texts, room = [], min(CHARS * self.cfg.max_tokens, MAX_LINE // 8)
        for call in request["calls"]:
            texts.append(cut(await self._call(environment, call["name"], call["arguments"]), room))
            room = max(0, room - len(texts[-1]))
        reward = await self._called(environment.turn_reward) if hasattr(environment, "turn_reward") else None
        wrong = sum(text.startswith("error: ") for text in texts)
        done = bool(getattr(environment, "done", False))
        return {"texts": texts, "wrong": wrong, "reward": number(reward), "done": done}

    async def _call(self, environment: Any, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of a call; for an invalid call its error."""
        if name not in self.schemas:
            return f"error: there is no tool {name!r}: there are {', '.join(self.schemas)}"
        function = self.tools.functions.get(name) or getattr(environment, name)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as cause:
            return f"error: {name}: {cause}"
        known = self.schemas[name]["parameters"].get("properties", {})
        for argument, value in arguments.items():
            if why := misfit(value, known.get(argument, {})):
                return f"error: {name}: {argument}: {why}"
        try:
            value = await self._called(function, **arguments)
        except MODELS_FAULT as cause:
            return f"error: {cause}"
        return value if isinstance(value, str) else json.dumps(value)

    async def _called(self, function: Callable, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await self.threads.run(function, **arguments)

    async def _score(self, request: dict[str, Any]) -> float | None:
        environment = self.objects[request["key"]]
        if self.tools.reward is not None:
            (value,) = await self._called(self.tools.reward, environments=[environment])
            return number(value)
        return number(await self._called(environment.get_reward)) if hasattr(environment, "get_reward") else 0.0

    async def _forget(self, request: dict[str, Any]) -> None:
        self.objects.pop(request["key"], None)

    async def end(self) -> None:
        """Release nothing: environments end with the process."""


async def _agents(cfg: EnvironmentConfig) -> ToolWorker:
    from aligner.environments.agents import Agents  # needs the extra `serve`

    worker = Agents(cfg)
    await worker.listen()
    return worker


class Threads:
    """Threads of the loop's executor, one for each call. Abandoned ones continue: they cannot be ended."""

    def __init__(self) -> None:
        self._calls: set[ThreadCall] = set()

    @property
    def left(self) -> int:
        return sum(call.given_up for call in list(self._calls))

    async def run(self, function: Callable, *args: Any, **arguments: Any) -> Any:
        call = ThreadCall()
        context = contextvars.copy_context()

        def work() -> Any:
            try:
                return context.run(function, *args, **arguments)
            except StopIteration as error:  # no future takes it: its caller would wait for ever
                raise RuntimeError(f"StopIteration {error}".strip()) from error
            finally:
                self._calls.discard(call)

        self._calls.add(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(None, work)
        except asyncio.CancelledError:
            call.given_up = True
            raise


class ThreadCall:
    given_up = False


async def _settled(work: Awaitable[Any]) -> tuple[Any, str]:
    """Return (value, "") if JSON can hold the value, else (None, the cause).

    User code may raise anything; SystemExit must not end the other trajectories.
    """
    try:
        value = await work
        if (size := len(encoded(value))) > MAX_LINE - 100:
            raise ValueError(f"an answer of {size} bytes: expected at most {MAX_LINE}")
        return value, ""
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, words(error)


def words(error: BaseException) -> str:
    try:
        return cut(f"{type(error).__name__}: {error}", MAX_WORDS)
    except Exception:
        return type(error).__name__


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}\n(cut here, of {len(text)} characters)"


def encoded(value: Any) -> bytes:
    """Encode JSON. Half surrogate pairs, as in file names that are not UTF-8, are replaced: no tokenizer takes them."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str | list)
    )


def number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"a reward of {value!r}: expected a finite number or None")
    return float(value)


async def serve(worker: ToolWorker, lines: asyncio.StreamReader, out: Callable[[bytes], object]) -> None:
    tasks: set[asyncio.Task] = set()

    def say(reply: dict[str, Any]) -> None:
        out(encoded(reply) + b"\n")

    async def one(request: dict[str, Any]) -> None:
        if request["op"] not in QUIET:
            say({"id": request["id"], "begun": True})
        say(await worker.answer(request))

    while line := await lines.readline():
        task = asyncio.create_task(one(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def main() -> None:
    leave_requests_to_rank()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)  # unbuffered: a forked child has nothing to flush
    os.dup2(2, 1)  # output of tools is not taken for an answer
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    lines = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    cfg = from_plain(EnvironmentConfig, json.loads(await lines.readline()), "environment", EnvironmentConfig)
    known = {schema["function"]["name"]: schema["function"] for schema in json.loads(await lines.readline())}
    worker: ToolWorker = ToolWorker(cfg, load_tools(cfg), known) if not cfg.agent else await _agents(cfg)
    await serve(worker, lines, partial(_write, replies.fileno()))
    await worker.end()
    os._exit(0)  # a hanging thread must not keep the process


def _write(handle: int, data: bytes) -> None:
    """Write all of a line before the next one."""
    while data:
        data = data[os.write(handle, data) :]


if __name__ == "__main__":
    asyncio.run(main())
