"""Agents in a worker process, and their endpoint: programs that speak an API of OpenAI or Anthropic.

async def run(task: Task, base_url: str, sampling: dict) -> float | dict | None        or `def`
a command line: {"task", "sampling"} on standard input, OPENAI_BASE_URL, ANTHROPIC_BASE_URL; the last line of its
output is the result

To the trainer an agent is an environment. `reset` starts it, `turn` answers its request; both return its next action:
{"request", "late"} or {"end"}. `score` refuses its further requests, and returns its final result.
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
    """A running agent."""

    secret: str
    program: asyncio.Task[Any]
    sampling: dict[str, Any]
    requests: asyncio.Queue[tuple[ChatRequest, bool, asyncio.Future]] = field(default_factory=asyncio.Queue)
    reply: asyncio.Future | None = None  # to the request that the engine answers now
    refusal: ApiError | None = None
    last: tuple[ChatRequest, asyncio.Future] | None = None  # the last request, and its reply

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Return the answer to a request; requests are answered in order of arrival.

        A repeated request gets the answer of the first. Raises ApiError.
        """
        check_model(request.model, MODEL)
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
        """Return the agent's next request or its end. Raises the program's exceptions."""
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
        assert self.reply is not None, "the agent has no open request"
        if not self.reply.done():
            self.reply.set_result(body)
        self.reply = None

    def refuse(self, error: ApiError) -> None:
        """Refuse the agent's open requests and all later ones."""
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
        os.environ.setdefault("OPENAI_API_KEY", "none")  # clients require one
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))

    async def listen(self) -> None:
        listener = loopback()
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(Listener(make_app(self, MAX_REQUEST)).serve(sockets=[listener]))

    async def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        secret, sampling = new_secret(), request["sampling"]
        task = Task(request["messages"], request["row"], request["seed"])
        visible = {name: sampling[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        program = asyncio.create_task(self._program(task, f"{self.address}/{secret}/v1", visible))
        program.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read: asyncio shall not warn
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
        """End the programs with their worker."""
        programs = [talk.program for talk in self.talks.values()]
        for key in list(self.objects):
            self._drop(key)
        await asyncio.gather(*programs, return_exceptions=True)

    def model(self, secret: str) -> str:
        self._talk(secret)
        return MODEL

    async def complete(self, secret: str, request: ChatRequest, say: Say) -> dict[str, Any]:
        """Return the whole answer, without streaming: answers to agents are logged whole."""
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
        except (SystemExit, KeyboardInterrupt) as error:  # they would end all agents of this process
            raise RuntimeError(words(error)) from None


async def _threaded(run: Callable, function: Callable, *args: Any, **keywords: Any) -> Any:
    """Run an agent in a thread, a coroutine in a loop of its own, so that a blocking agent blocks only itself."""
    if not asyncio.iscoroutinefunction(function):
        return await run(function, *args, **keywords)
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = []

    async def noted() -> Any:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        return await function(*args, **keywords)

    try:
        return await run(lambda: asyncio.run(noted()))
    except asyncio.CancelledError:
        for loop, task in begun:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        raise


async def _commanded(command: list[str], task: Task, base_url: str, sampling: dict[str, Any]) -> Any:
    process = await asyncio.create_subprocess_exec(
        *guarded(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | addresses(base_url),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(ConnectionError):  # the program need not read its input
            process.stdin.write(encoded({"task": asdict(task), "sampling": sampling}))
            process.stdin.close()
        last = await _last_line(process.stdout)
        await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # its guard kills it and its children
    if process.returncode:
        raise RuntimeError(f"the program ended with exit code {process.returncode}")
    return parse_json(last, "its last line", EnvironmentCodeError)


def addresses(base_url: str) -> dict[str, str]:
    """Return the variables by which clients of OpenAI and Anthropic know an address."""
    own = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    return own | {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}


async def _last_line(output: asyncio.StreamReader) -> bytes:
    """Return the last line that is not blank. Only that line is held in memory."""
    last, rest = b"", b""
    while block := await output.read(1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), last)
        if len(rest) > MAX_REQUEST:
            raise ValueError(f"its output: expected lines of at most {MAX_REQUEST} bytes")
    return rest if rest.strip() else last


def reward_of(value: Any) -> float | None:
    """Return the reward in an agent's result. Raises TypeError."""
    json.dumps(value)  # the log holds the whole result
    if isinstance(value, dict):
        if "reward" not in value:
            raise TypeError(f"an agent's result {value!r:.200}: expected `reward` in it")
        value = value["reward"]
    return number(value)
