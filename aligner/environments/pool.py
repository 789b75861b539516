"""Tools and environments in their own processes, called for many trajectories at a time.

One thread runs the loop of all conversations with the workers. A failed question is repeated in a new environment,
which first gets all earlier questions of its trajectory. After environment.retries the answer is a failure. Answers and
failures are logged, and logged questions are not repeated: an environment is made at the first question that is not in
the log. If it answers an earlier question otherwise than before, it is not the one that the model has seen: the answer
is then {"restarted"}, and the trajectory begins again. That answer is logged too, so another start does the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aligner.answers import Answer, AnswerLog
from aligner.awaited import AwaitedThread
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.process import KILL_S, START_S, Process, QuestionFailed

END_S = 1.0  # for workers to end before they are terminated
SHOWN = 80  # characters of a difference
_numbers = itertools.count()


@dataclass
class Session:
    """A trajectory's environment: `key` is unique in the run, `seed` is its group's."""

    key: str
    seed: int
    row: dict[str, Any]
    logged: bool = True
    log: AnswerLog | None = None  # of its rollout, if several are open; None: the pool's
    asked: list[dict[str, Any]] = field(default_factory=list)  # all questions
    answered: list[Answer] = field(default_factory=list)  # of an environment: their answers, but of an open one
    tried: int = 0  # retries of the trajectories that began again
    apart: bool = False  # one question at a time: one of those may have ended its process
    worker: _Worker | None = None  # that makes its environment
    process: Process | None = None  # that holds its environment
    name: str = ""  # of the environment there
    played: int = 0  # questions that this environment has answered

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without its environment: in another process, or after a restart, `asked` makes it anew."""
        return self.__dict__ | {"log": None, "worker": None, "process": None, "name": ""}

    def again(self, answer: Answer, number: int) -> Session:
        """Return the session of the trajectory that begins again after such an answer, for the `number`-th time."""
        key, tried = f"{self.key.partition('.')[0]}.{number}", self.tried + answer["retried"]
        return Session(key, self.seed, self.row, self.logged, self.log, tried=tried, apart=answer["apart"])


class Pool:
    def __init__(self, cfg: EnvironmentConfig, schemas: list[dict[str, Any]], log: AnswerLog):
        self.cfg, self.log = cfg, log
        # an agent's requests have all that was said; functions keep nothing
        self._compares = bool(cfg.path) and not cfg.agent
        self._loop = asyncio.new_event_loop()
        self._workers = [_Worker(cfg, schemas) for _ in range(cfg.workers)]
        self._turn = itertools.cycle(self._workers)
        self._apart = _Worker(cfg, schemas, asyncio.Lock())  # for one question at a time
        self._thread = AwaitedThread("environments", partial(_run, self._loop))
        self._thread.start()
        weakref.finalize(self, _close, self._thread, self._loop, [*self._workers, self._apart])

    def ask(self, session: Session, op: str, **arguments: Any) -> Future[Answer]:
        """Ask a question: returns {"value", "seconds", "retried"}, {"failed", "text", ...} with one of CAUSES, or
        {"restarted", ...}: why the trajectory has to begin again.

        Questions of a session are asked one after the other.
        """
        session.asked.append({"op": op, **arguments})
        return self.ask_again(session)

    def ask_again(self, session: Session) -> Future[Answer]:
        """Ask the last question of a session again, after a restart."""
        asked = asyncio.run_coroutine_threadsafe(self._ask(session, len(session.asked) - 1), self._loop)
        return self._thread.owe(asked)

    def forget(self, session: Session) -> None:
        """Release the environment of a trajectory that has ended."""
        if session.process is not None:
            asyncio.run_coroutine_threadsafe(_forget(session), self._loop)

    async def _ask(self, session: Session, number: int) -> Answer:
        question, log = session.asked[number], session.log or self.log
        answer = log.find(session.key, number, question) if session.logged else None
        if answer is None:
            answer = await self._answer(session, number)
            if session.logged:
                log.write(session.key, number, question, answer)
        if self._compares:
            session.answered[number:] = [answer]
        return answer

    async def _answer(self, session: Session, number: int) -> Answer:
        """Return the answer. Seconds are those of its tries, without waits for others."""
        seconds, retried, apart = 0.0, 0, session.apart
        while True:
            worker = self._worker(session, apart)
            async with worker.turn or nullcontext():
                since = time.monotonic()
                try:
                    value = await self._live(session, worker, number)
                    seconds += time.monotonic() - since
                    return {"value": value, "seconds": seconds, "retried": retried}
                except QuestionFailed as failure:
                    seconds += time.monotonic() - since
                    _leave(session)  # the state of its environment is unknown
                    if failure.blamed and retried + session.tried >= self.cfg.retries:
                        answer = {"failed": failure.cause, "text": str(failure)}
                        return answer | {"seconds": seconds, "retried": retried}
                    retried += failure.blamed
                    apart = apart or failure.alone
                except AnsweredOtherwise as difference:
                    await _forget(session)
                    return {"restarted": str(difference), "apart": apart, "seconds": seconds, "retried": retried}

    def _worker(self, session: Session, apart: bool) -> _Worker:
        if apart:
            return self._apart
        if session.process is None or session.process.gone:
            return next(self._turn)
        assert session.worker is not None
        return session.worker

    async def _live(self, session: Session, worker: _Worker, number: int) -> Any:
        if session.process is None or session.process.gone or session.worker is not worker:
            _leave(session)
            process = await worker.ready()
            session.worker, session.process, session.name = worker, process, f"{session.key}/{next(_numbers)}"
            process.keys.add(session.name)
            session.played = 0
        while True:
            played, process = session.played, session.process
            value = await process.ask(session.asked[played] | {"key": session.name}, self.cfg.timeout_s)
            session.played += 1
            if played == number:
                return value
            if self._compares and (text := _difference(session, played, value)):
                raise AnsweredOtherwise(text)


@dataclass
class _Worker:
    """A worker: one process that takes trajectories; earlier ones may still hold some. `turn`: lock for one question at
    a time."""

    cfg: EnvironmentConfig
    schemas: list[dict[str, Any]]
    turn: asyncio.Lock | None = None
    processes: list[Process] = field(default_factory=list)  # not ended, the newest last
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ready(self) -> Process:
        """Return a process that takes trajectories, started if needed. Raises Failed."""
        async with self._starting:
            if not self.processes or self.processes[-1].retire():
                self.processes = [one for one in self.processes if not one.ended.done()]
                self.processes.append(await Process.start(self.cfg, self.schemas))
                await self.processes[-1].ask({"op": "ready"}, START_S)
            return self.processes[-1]


class AnsweredOtherwise(Exception):
    """A new environment gave an earlier question another answer."""


def _difference(session: Session, number: int, value: Any) -> str:
    """Return where an answer differs from the earlier one; "" if it does not."""
    before = session.answered[number].get("value", value) if number < len(session.answered) else value
    if before == value:
        return ""
    what, pair = session.asked[number]["op"], (before, value)
    if what == "turn":
        answers = zip(session.asked[number]["calls"], before["texts"], value["texts"], strict=True)
        for call, *texts in answers:
            if texts[0] != texts[1]:
                what, pair = f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}", (texts[0], texts[1])
                break
    first, second = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in pair)
    differs = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    same = next(differs, min(len(first), len(second)))
    new, old = (text[same : same + SHOWN] for text in (second, first))
    behind = f" behind {same} characters" if same else ""
    return f"question {number}, {what:.{2 * SHOWN}}, was answered{behind} by {old!r}, and now by {new!r}"


async def _forget(session: Session) -> None:
    process, name = session.process, session.name
    if process is not None and not process.gone:
        with suppress(QuestionFailed):
            await process.ask({"op": "forget", "key": name}, process.cfg.timeout_s)
    _leave(session)


def _leave(session: Session) -> None:
    process, session.process = session.process, None
    if process is not None:
        process.keys.discard(session.name)
        process.retire()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close(thread: threading.Thread, loop: asyncio.AbstractEventLoop, workers: list[_Worker]) -> None:
    """End the workers and the loop's thread.

    The collector may call this in the loop's own thread, which cannot wait for itself. A forked process has no such
    thread.
    """
    if thread.is_alive():
        ending = asyncio.run_coroutine_threadsafe(_end(workers), loop)
        # a plain `stop`, if the end came before this line, would set a flag that wakes no loop
        ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        if thread is not threading.current_thread():
            thread.join(END_S + 2 * KILL_S)


async def _end(workers: list[_Worker]) -> None:
    """Cancel open questions, and end the processes.

    A cancelled question gets no answer, because an answer would be logged as a failure.
    """
    open_ = asyncio.all_tasks() - {asyncio.current_task()}
    for task in open_:
        task.cancel()
    await asyncio.gather(*open_, return_exceptions=True)
    running = [process for worker in workers for process in worker.processes if not process.ended.done()]
    for process in running:
        process.close()
    for end, limit_s in ((None, END_S), (Process.terminate, KILL_S), (Process.kill, KILL_S)):
        late = [process for process in running if not process.ended.done()]
        for process in late if end else ():
            end(process)
        if late:
            await asyncio.wait([process.ended for process in late], timeout=limit_s)
    for process in running:
        process.transport.close()
