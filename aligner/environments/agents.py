"""Agents in a worker process, and their endpoint: programs that speak an API of OpenAI or Anthropic.

async def run(task: Task, base_url: str, sampling: dict) -> float | dict | None        or `def`
a command line: {"task", "sampling"} on standard input, OPENAI_BASE_URL, ANTHROPIC_BASE_URL; the last line of its
output is the result
with environment.path: the command line runs in the environment's sandbox, whose tests decide the reward

To the trainer an agent is an environment. `reset` starts it, `turn` answers its request; both return its next action:
{"request", "late", "digest"} or {"end"}. Between them the agent waits for its reply, as long as the engine takes: no
question is open then, so no time limit counts. `score` refuses its further requests, and returns its final result.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from socket import socket
from typing import Any

from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.endpoint import END_S, Listener, Say, loopback, make_app, new_secret
from aligner.environments.limits import MAX_REQUEST
from aligner.environments.openai_api import MODEL, ApiError, ChatRequest, check_model, check_sampling, nowhere
from aligner.environments.opening import with_opening
from aligner.environments.tools import load_agent, load_tools
from aligner.environments.worker import ToolWorker, encoded, number, words
from aligner.errors import EnvironmentCodeError
from aligner.foreign import parse_json
from aligner.processes import guarded

KEPT = 16  # of an agent's requests with a reply, whose clients may repeat them
ORDER_S = 1.0  # for requests of a restarted agent that come in another order


@dataclass(frozen=True)
class Task:
    messages: list[dict[str, Any]]  # the row's prompt
    row: dict[str, Any]  # its other columns
    seed: int  # the same for a whole group


@dataclass(eq=False)
class SentRequest:
    request: ChatRequest
    late: bool  # it came before the previous one was answered
    reply: asyncio.Future
    repeated: int = 0  # by its client, which gave up waiting

    def __post_init__(self) -> None:
        asked = json.dumps([self.request.messages, self.request.tools])
        self.digest = hashlib.sha256(asked.encode()).hexdigest()[:16]


@dataclass
class RunningAgent:
    """A running agent."""

    secret: str
    program: asyncio.Task[Any]
    sampling: dict[str, Any]
    sent: list[SentRequest] = field(default_factory=list)  # in order of arrival: those without a reply, and some others
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: ApiError | None = None
    cut: bool = False  # the last answer was longer than allowed

    @property
    def may_die(self) -> bool:
        """Return whether an error of the program is no failure: clients raise errors for refusals, and some for an
        answer that was cut."""
        return self.cut or self.refusal is not None

    @property
    def open(self) -> list[SentRequest]:
        """The requests without a reply. The engine answers the first one, in this call or in a later window."""
        return [one for one in self.sent if not one.reply.done()]

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Return the answer to a request; requests are answered in order of arrival.

        A repeated request gets the answer of the first. Raises ApiError.
        """
        check_model(request.model, MODEL)
        check_sampling(request, self.sampling)
        if request.again and (earlier := self._repeated(request)) is not None:
            return await asyncio.shield(earlier.reply)
        if self.refusal is not None:
            raise self.refusal
        reply, answered = asyncio.get_running_loop().create_future(), [one for one in self.sent if one.reply.done()]
        self.sent = [*answered[-KEPT:], *self.open, SentRequest(request, bool(self.open), reply)]
        self.arrived.set()
        return await asyncio.shield(reply)

    def _repeated(self, request: ChatRequest) -> SentRequest | None:
        """Return the earlier request that this one repeats: of equal ones the last without a reply that was repeated
        least."""
        equal = [one for one in reversed(self.sent) if one.request == request]
        earlier = min(equal, key=lambda one: (one.reply.done(), one.repeated), default=None)
        if earlier is not None:
            earlier.repeated += 1
        return earlier

    async def next(self) -> dict[str, Any]:
        """Return the agent's next request or its end. Raises the program's exceptions, see `result`."""
        while not self.open and not self.program.done():
            self.arrived.clear()
            arrival = asyncio.create_task(self.arrived.wait())
            try:
                await asyncio.wait((arrival, self.program), return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrival.cancel()
        if self.program.done():
            result = self.result()
            return {"end": reward_of(result), "value": result}
        first = self.open[0]
        return {"request": asdict(first.request), "late": first.late, "digest": first.digest}

    def result(self) -> Any:
        """Return what the program has returned; None if it died as it may. Raises the program's exceptions."""
        return None if self.may_die and self.program.exception() is not None else self.program.result()

    async def answer(self, digest: str, body: dict[str, Any]) -> None:
        """Answer the request with this digest. A restarted agent may send its requests in another order: wait for it
        a moment. If it does not come, the agent asks something else now: answer its first request."""
        until = time.monotonic() + ORDER_S
        while not (same := [one for one in self.open if one.digest == digest]):
            if self.program.done() or time.monotonic() > until:
                break
            await asyncio.sleep(0.01)
        assert self.open, "the agent has no open request"
        (same or self.open)[0].reply.set_result(body)

    def refuse(self, error: ApiError) -> None:
        """Refuse the agent's open requests and all later ones."""
        self.refusal = error
        for one in self.open:
            one.reply.set_exception(error)


class Agents(ToolWorker):
    def __init__(self, cfg: EnvironmentConfig):
        super().__init__(cfg, load_tools(cfg), {})
        self.function = load_agent(cfg)
        self.talks: dict[str, RunningAgent] = {}  # by secret; `objects` has them by trajectory
        os.environ.setdefault("OPENAI_API_KEY", "none")  # clients require one
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))

    async def listen(self) -> None:
        listener = loopback()
        self.app, self.address = make_app(self, MAX_REQUEST), _address(listener)
        self._serving = asyncio.create_task(Listener(self.app).serve(sockets=[listener]))

    async def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        secret, sampling = new_secret(), request["sampling"]
        task = Task(request["messages"], request["row"], request["seed"])
        visible = {name: sampling[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        program = asyncio.create_task(self._program(task, secret, visible))
        program.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read: asyncio shall not warn
        talk = self.objects[request["key"]] = self.talks[secret] = RunningAgent(secret, program, sampling)
        return await talk.next()

    async def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        talk = self.objects[request["key"]]
        await talk.answer(request["digest"], request["body"])
        talk.cut = request["body"]["choices"][0].get("finish_reason") == "length"
        return await talk.next()

    async def _score(self, request: dict[str, Any]) -> float | None:
        talk = self.objects[request["key"]]
        talk.refuse(ApiError(request["why"], code=request["code"]))
        await asyncio.wait((talk.program,))
        return reward_of(talk.result())

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

    async def _program(self, task: Task, secret: str, sampling: dict[str, Any]) -> Any:
        base_url = f"{self.address}/{secret}/v1"
        try:
            if self.tools.kind is not None:
                return await self._housed(task, secret, sampling)
            if self.function is None:
                return await _commanded(self.cfg.command, task, base_url, sampling)
            return await _threaded(self.threads.run, self.function, task, base_url, sampling, **self.cfg.args)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end all agents of this process
            raise RuntimeError(words(error)) from None

    async def _housed(self, task: Task, secret: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Run a command line in the sandbox of an environment, which decides the reward after it has ended."""
        environment = await self._called(self.tools.kind, **self.cfg.args)
        environment.listens, server = True, Listener(self.app, END_S)
        try:
            opening = await self._opening(environment, task.seed, task.row)
            messages = with_opening(task.messages, opening)
            serving = asyncio.create_task(server.serve(sockets=[environment.listener]))
            serving.add_done_callback(lambda _: environment)  # which keeps the socket open until then
            variables = addresses(f"{_address(environment.listener)}/{secret}/v1")
            # without the row's columns, which the model could read there
            data = encoded({"task": asdict(Task(messages, {}, task.seed)), "sampling": sampling})
            end = await self._called(
                environment.run_agent, command=self.cfg.command, data=data, environ=variables, turns=self.cfg.max_turns
            )
            server.should_exit = True
            await serving
            if end["status"] and secret in self.talks and not self.talks[secret].may_die:
                raise RuntimeError(f"the program ended with exit code {end['status']}: {end['out'][-500:]}")
            return {"reward": await self._called(environment.get_reward), "ended": end["why"]}
        finally:
            server.should_exit = True
            environment.end_agent()


def _address(listener: socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


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
