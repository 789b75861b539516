"""Agents, and the endpoint that they talk to, in a worker process: programs that speak OpenAI's chat API.

async def run(task: Task, base_url: str, sampling: dict) -> float | dict | None        or `def`
a command line: {"task", "sampling"} on standard input, OPENAI_BASE_URL; the last line of its output is the result

To the trainer an agent is an environment. `reset` begins it, `turn` answers its request; each gives what it does next:
{"request", "late"} or {"end"}. `score` refuses what else it asks, and gives the result that it then comes to.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.endpoint import Listener, Say, loopback, make_app, new_secret
from aligner.environments.limits import MAX_REQUEST
from aligner.environments.openai_api import MODEL, ApiError, ChatRequest, check_model, check_sampling, nowhere
from aligner.environments.tools import Tools, load_agent
from aligner.environments.worker import ToolWorker, encoded, number, words
from aligner.errors import EnvironmentCodeError
from aligner.foreign import parse_json
from aligner.processes import guarded


@dataclass(frozen=True)
class Task:
    messages: list[dict[str, Any]]  # the row's prompt
    row: dict[str, Any]  # its other columns
    seed: int  # the same for a whole group


@dataclass
class RunningAgent:
    """One agent at work."""

    secret: str
    program: asyncio.Task[Any]
    sampling: dict[str, Any]
    requests: asyncio.Queue[tuple[ChatRequest, bool, asyncio.Future]] = field(default_factory=asyncio.Queue)
    reply: asyncio.Future | None = None  # to what the engine answers now
    refusal: ApiError | None = None
    last: tuple[ChatRequest, asyncio.Future] | None = None  # that was asked, and its reply

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Requests are answered one after the other, as they came; one that is asked again has the answer of the first.
        Raises ApiError."""
        check_model(request, MODEL)
        check_sampling(request, self.sampling)
        if request.again and self.last is not None and self.last[0] == request:
            return await self.last[1]
        if self.refusal is not None:
            raise self.refusal
        late = self.reply is not None or not self.requests.empty()
        reply = asyncio.get_running_loop().create_future()
        self.last = request, reply
        self.requests.put_nowait((request, late, reply))
        return await reply

    async def next(self) -> dict[str, Any]:
        """Raises what the program raises."""
        arrival = asyncio.create_task(self.requests.get())
        try:
            await asyncio.wait((arrival, self.program), return_when=asyncio.FIRST_COMPLETED)
            if self.program.done():
                return {"end": reward_of(self.program.result()), "value": self.program.result()}
            request, late, self.reply = arrival.result()
            return {"request": asdict(request), "late": late}
        finally:
            arrival.cancel()

    def answer(self, body: dict[str, Any]) -> None:
        assert self.reply is not None, "the agent has asked nothing"
        if not self.reply.done():
            self.reply.set_result(body)
        self.reply = None

    def refuse(self, error: ApiError) -> None:
        """What it has asked, and whatever it will."""
        self.refusal = error
        waiting = [] if self.reply is None else [self.reply]
        while not self.requests.empty():
            waiting.append(self.requests.get_nowait()[2])
        for reply in waiting:
            if not reply.done():
                reply.set_exception(error)


class Agents(ToolWorker):
    def __init__(self, cfg: EnvironmentConfig):
        super().__init__(cfg, Tools(agent=True), {})
        self.function = load_agent(cfg)
        self.talks: dict[str, RunningAgent] = {}  # by secret; `objects` has them by trajectory
        os.environ.setdefault("OPENAI_API_KEY", "none")  # which clients want to have
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))

    async def listen(self) -> None:
        place = loopback()
        self.address = f"http://127.0.0.1:{place.getsockname()[1]}"
        self._serving = asyncio.create_task(Listener(make_app(self, MAX_REQUEST)).serve(sockets=[place]))

    async def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        secret, sampling = new_secret(), request["sampling"]
        task = Task(request["messages"], request["row"], request["seed"])
        told = {name: sampling[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        program = asyncio.create_task(self._program(task, f"{self.address}/{secret}/v1", told))
        program.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may be that nobody asks
        talk = self.objects[request["key"]] = self.talks[secret] = RunningAgent(secret, program, sampling)
        return await talk.next()

    async def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        talk = self.objects[request["key"]]
        talk.answer(request["body"])
        return await talk.next()

    async def _score(self, request: dict[str, Any]) -> float | None:
        talk = self.objects[request["key"]]
        talk.refuse(ApiError(request["why"], code=request["code"]))
        await asyncio.wait((talk.program,))
        return reward_of(talk.program.result()) if talk.program.exception() is None else None

    async def _forget(self, request: dict[str, Any]) -> None:
        self._drop(request["key"])

    def _drop(self, key: str) -> None:
        talk = self.objects.pop(key, None)
        if talk is not None:
            del self.talks[talk.secret]
            talk.refuse(nowhere())
            talk.program.cancel()

    async def end(self) -> None:
        """Programs end with their worker."""
        programs = [talk.program for talk in self.talks.values()]
        for key in list(self.objects):
            self._drop(key)
        await asyncio.gather(*programs, return_exceptions=True)

    def model(self, secret: str) -> str:
        self._talk(secret)
        return MODEL

    async def complete(self, secret: str, request: ChatRequest, say: Say) -> dict[str, Any]:
        """Whole: what an agent was told is in the log of answers."""
        return await self._talk(secret).ask(request)

    def _talk(self, secret: str) -> RunningAgent:
        if secret not in self.talks:
            raise nowhere()
        return self.talks[secret]

    async def _program(self, task: Task, base_url: str, sampling: dict[str, Any]) -> Any:
        try:
            if self.function is None:
                return await _commanded(self.cfg.command, task, base_url, sampling)
            return await _threaded(self.threads.run, self.function, task, base_url, sampling, **self.cfg.args)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end all agents of this process
            raise RuntimeError(words(error)) from None


async def _threaded(run: Callable, function: Callable, *args: Any, **more: Any) -> Any:
    """An agent that blocks shall block itself alone: a coroutine has a loop of its own."""
    if not asyncio.iscoroutinefunction(function):
        return await run(function, *args, **more)
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = []

    async def noted() -> Any:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        return await function(*args, **more)

    try:
        return await run(lambda: asyncio.run(noted()))
    except asyncio.CancelledError:
        for loop, task in begun:
            with suppress(RuntimeError):  # it has come to its end
                loop.call_soon_threadsafe(task.cancel)
        raise


async def _commanded(command: list[str], task: Task, base_url: str, sampling: dict[str, Any]) -> Any:
    process = await asyncio.create_subprocess_exec(
        *guarded(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(ConnectionError):  # it need not read that
            process.stdin.write(encoded({"task": asdict(task), "sampling": sampling}))
            process.stdin.close()
        last = await _last_line(process.stdout)
        await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # its guard kills it, and whatever it has started
    if process.returncode:
        raise RuntimeError(f"the program ended with exit code {process.returncode}")
    return parse_json(last, "its last line", EnvironmentCodeError)


async def _last_line(output: asyncio.StreamReader) -> bytes:
    """That has more than blanks. Of what is printed no more is kept."""
    last, rest = b"", b""
    while part := await output.read(1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), last)
        if len(rest) > MAX_REQUEST:
            raise ValueError(f"its output: expected lines of at most {MAX_REQUEST} bytes")
    return rest if rest.strip() else last


def reward_of(value: Any) -> float | None:
    """Raises TypeError."""
    json.dumps(value)  # the log has all of it
    if isinstance(value, dict):
        if "reward" not in value:
            raise TypeError(f"an agent's result {value!r:.200}: expected `reward` in it")
        value = value["reward"]
    return number(value)
