"""A process of tools and environments: JSON lines {id, op, key, ...} in, {id, value} or {id, cause, text} out.

Requests of one trajectory (`key`) come one after the other, those of several at a time: coroutines share one loop,
other functions have a thread each. What takes longer than it may is given up; what cannot be
given up (a thread that holds the interpreter) is the parent's to kill. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aligner.config.options import from_plain
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.tools import Tools, load_tools, misfit

THREADS = 1024
MODELS_FAULT = (ValueError, ArithmeticError)  # of a tool: its text goes to the model; anything else is a failure


class Worker:
    def __init__(self, cfg: EnvironmentConfig, tools: Tools, schemas: dict[str, Any]):
        self.cfg, self.tools, self.schemas = cfg, tools, schemas
        self.objects: dict[str, Any] = {}  # environments by trajectory

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            work = getattr(self, f"_{request['op']}")(request)
            return {"id": request["id"], "value": await asyncio.wait_for(work, self.cfg.timeout_s)}
        except TimeoutError:
            cause, text = "hung", f"no answer in {self.cfg.timeout_s:g} s"
        except BaseException as error:  # the user's code may raise anything; told, counted and tried again
            cause, text = "raised", f"{type(error).__name__}: {error}"
        await self._forget(request)  # it is tried again in another one
        return {"id": request["id"], "cause": cause, "text": text}

    async def _ready(self, request: dict[str, Any]) -> None:
        """It has read what it needs."""

    async def _reset(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """The messages that it opens with."""
        if self.tools.kind is None:
            return []
        found = self.objects[request["key"]] = await _called(self.tools.kind, **self.cfg.args)
        row = {"seed": request["seed"]} | {k: v for k, v in request["row"].items() if k != "seed"}
        taken = inspect.signature(found.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            row = {name: value for name, value in row.items() if name in taken}
        opening = await _called(found.reset, **row)
        if isinstance(opening, str):
            return [{"role": "user", "content": opening}]
        good = opening is None or (
            isinstance(opening, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in opening)
        )
        if not good:
            raise TypeError(f"reset returned {opening!r:.200}: expected None, a text or a list of {{role, content}}")
        return opening or []

    async def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """What each call gives, as text; the turn's reward, and whether the environment is done."""
        found = self.objects.get(request["key"])
        texts = [await self._call(found, call["name"], call["arguments"]) for call in request["calls"]]
        reward = await _called(found.turn_reward) if hasattr(found, "turn_reward") else None
        wrong = sum(text.startswith("error: ") for text in texts)
        return {"texts": texts, "wrong": wrong, "reward": number(reward), "done": bool(getattr(found, "done", False))}

    async def _call(self, found: Any, name: str, arguments: dict[str, Any]) -> str:
        """What is wrong with a call is its result."""
        if name not in self.schemas:
            return f"error: there is no tool {name!r}: there are {', '.join(self.schemas)}"
        function = self.tools.functions.get(name) or getattr(found, name)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as cause:
            return f"error: {name}: {cause}"
        known = self.schemas[name]["parameters"].get("properties", {})
        for argument, value in arguments.items():
            if why := misfit(value, known.get(argument, {})):
                return f"error: {name}: {argument}: {why}"
        try:
            value = await _called(function, **arguments)
        except MODELS_FAULT as cause:
            return f"error: {cause}"
        return value if isinstance(value, str) else json.dumps(value)

    async def _score(self, request: dict[str, Any]) -> float | None:
        found = self.objects[request["key"]]
        return number(await _called(found.get_reward)) if hasattr(found, "get_reward") else 0.0

    async def _forget(self, request: dict[str, Any]) -> None:
        self.objects.pop(request["key"], None)

    async def end(self) -> None:
        """Nobody will ask any more."""


async def _agents(cfg: EnvironmentConfig) -> Worker:
    from aligner.environments.agents import Agents  # needs the extra `serve`

    found = Agents(cfg)
    await found.listen()
    return found


async def _called(function: Callable, **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"a reward of {value!r}: expected a finite number or None")
    return float(value)


async def serve(worker: Worker, lines: asyncio.StreamReader, out: Callable[[str], None]) -> None:
    tasks: set[asyncio.Task] = set()

    async def one(request: dict[str, Any]) -> None:
        out(json.dumps(await worker.answer(request), ensure_ascii=False) + "\n")

    while line := await lines.readline():
        task = asyncio.create_task(one(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's: a batch system sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    # no tokenizer takes half a surrogate pair, as in names of files that are no UTF-8
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    os.dup2(2, 1)  # what tools print shall not be taken for an answer
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    lines = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    cfg = from_plain(EnvironmentConfig, json.loads(await lines.readline()), "environment", EnvironmentConfig)
    known = {schema["function"]["name"]: schema["function"] for schema in json.loads(await lines.readline())}
    worker: Worker = Worker(cfg, load_tools(cfg), known) if not cfg.agent else await _agents(cfg)
    await serve(worker, lines, replies.write)
    await worker.end()
    os._exit(0)  # a thread that hangs shall not keep the process


if __name__ == "__main__":
    asyncio.run(main())
