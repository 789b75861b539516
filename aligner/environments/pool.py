"""Tools and environments in processes of their own, asked for many trajectories at a time.

One thread holds the loop of all conversations with the workers. A question that fails is asked again in a new
environment, which first hears all questions of its trajectory so far; after environment.retries the answer is a
failure. Answers, failures too, are in the log, and those found there are not asked for: an environment is made when
the log knows no more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from aligner.answers import Answer, AnswerLog
from aligner.config.sections.environment import EnvironmentConfig

START_S = 600.0  # of a worker: its imports on a busy machine, which are not of its first answer's time
GRACE_S = 5.0  # beyond environment.timeout_s, which a worker keeps by itself unless something holds its interpreter
CAUSES = ("raised", "hung", "died")  # of a failure: by the code, out of time, the process ended
_numbers = itertools.count()


class Failed(Exception):
    def __init__(self, cause: str, text: str):
        super().__init__(text)
        self.cause = cause


@dataclass
class Session:
    """A trajectory's side: `key` is its own in the run, `seed` its group's."""

    key: str
    seed: int
    row: dict[str, Any]
    logged: bool = True
    log: AnswerLog | None = None  # of its rollout, where several are under way; None: the pool's
    asked: list[dict[str, Any]] = field(default_factory=list)  # all questions
    worker: _Worker | None = None  # that holds its environment
    process: int = -1  # which of that worker's
    name: str = ""  # of the environment there

    def __getstate__(self) -> dict[str, Any]:
        """In another process, or after a restart, `asked` makes its environment anew."""
        return self.__dict__ | {"log": None, "worker": None, "process": -1, "name": ""}


class Pool:
    def __init__(self, cfg: EnvironmentConfig, schemas: list[dict[str, Any]], log: AnswerLog):
        self.cfg, self.log = cfg, log
        self._loop = asyncio.new_event_loop()
        self._workers = [_Worker(cfg, schemas) for _ in range(cfg.workers)]
        self._turn = itertools.cycle(self._workers)
        thread = threading.Thread(target=_run, args=(self._loop,), name="environments", daemon=True)
        thread.start()
        weakref.finalize(self, _close, thread, self._loop, self._workers)

    def ask(self, session: Session, op: str, **more: Any) -> Future[Answer]:
        """{"value", "seconds", "retried"}, or {"failed", "text", ...} with one of CAUSES. Questions of a session come
        one after the other."""
        session.asked.append({"op": op, **more})
        return self.ask_again(session)

    def ask_again(self, session: Session) -> Future[Answer]:
        """The last of its questions, which nobody here waits for."""
        return asyncio.run_coroutine_threadsafe(self._ask(session, len(session.asked) - 1), self._loop)

    def forget(self, session: Session) -> None:
        """Its trajectory has ended."""
        if session.worker is not None:
            asyncio.run_coroutine_threadsafe(_forget(session), self._loop)

    async def _ask(self, session: Session, number: int) -> Answer:
        question, log = session.asked[number], session.log or self.log
        answer = log.find(session.key, number, question) if session.logged else None
        if answer is None:
            answer = await self._answer(session, number)
            if session.logged:
                log.write(session.key, number, question, answer)
        return answer

    async def _answer(self, session: Session, number: int) -> Answer:
        since, retried = time.monotonic(), 0
        while True:
            try:
                value = await self._live(session, number)
                return {"value": value, "seconds": time.monotonic() - since, "retried": retried}
            except Failed as failure:
                session.worker = None  # what state its environment is in, nobody knows
                if retried == self.cfg.retries:
                    told = {"failed": failure.cause, "text": str(failure)}
                    return told | {"seconds": time.monotonic() - since, "retried": retried}
                retried += 1

    async def _live(self, session: Session, number: int) -> Any:
        if session.worker is None or session.process != session.worker.number or session.worker.ended:
            session.worker, session.name = next(self._turn), f"{session.key}/{next(_numbers)}"
            await session.worker.start()
            session.process = session.worker.number
            for earlier in session.asked[:number]:
                await session.worker.ask(earlier | {"key": session.name})
        return await session.worker.ask(session.asked[number] | {"key": session.name})


class _Worker:
    """One process at a time."""

    def __init__(self, cfg: EnvironmentConfig, schemas: list[dict[str, Any]]):
        self.cfg, self.schemas = cfg, schemas
        self.number = -1  # of processes so far
        self.process: asyncio.subprocess.Process | None = None
        self.reading: asyncio.Task[None] | None = None  # what it answers
        self._open: dict[int, asyncio.Future] = {}
        self._starting = asyncio.Lock()

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.returncode is not None

    async def start(self) -> None:
        async with self._starting:
            if not self.ended:
                return
            self._open = {}  # those of the process before are told of its end by who reads it
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "aligner.environments.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                limit=1 << 30,
            )
            self.number += 1
            self._send(asdict(self.cfg))
            self._send(self.schemas)
            self.reading = asyncio.create_task(_read(self.process, self._open))
            await self.ask({"op": "ready"}, START_S)

    async def ask(self, question: dict[str, Any], limit_s: float | None = None) -> Any:
        """Raises Failed. Without `limit_s` within environment.timeout_s."""
        limit = self.cfg.timeout_s if limit_s is None else limit_s
        if self.ended:  # who reads it has told of that already
            raise died(self.process)
        open_, number, found = self._open, next(_numbers), asyncio.get_running_loop().create_future()
        open_[number] = found
        try:
            self._send(question | {"id": number})
            reply = await asyncio.wait_for(found, limit + GRACE_S)
        except TimeoutError:
            await self.kill()
            raise Failed("hung", f"no answer in {limit:g} s, and its process was killed") from None
        finally:
            open_.pop(number, None)
        if "cause" in reply:
            raise Failed(reply["cause"], reply["text"])
        return reply["value"]

    async def kill(self) -> None:
        """Nothing is asked of it any more when this returns."""
        if not self.ended:
            self.process.kill()
            await self.process.wait()

    def _send(self, message: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(message)}\n".encode())


async def _read(process: asyncio.subprocess.Process, open_: dict[int, asyncio.Future]) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        reply = json.loads(line)
        if (found := open_.get(reply["id"])) is not None and not found.done():
            found.set_result(reply)
    await process.wait()
    for found in open_.values():
        if not found.done():
            found.set_exception(died(process))


def died(process: asyncio.subprocess.Process) -> Failed:
    return Failed("died", f"its process ended with exit code {process.returncode}")


async def _forget(session: Session) -> None:
    if session.worker is not None and session.process == session.worker.number:
        await session.worker.ask({"op": "forget", "key": session.name})


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(thread: threading.Thread, loop: asyncio.AbstractEventLoop, workers: list[_Worker]) -> None:
    """The collector may call this in the loop's own thread, which cannot wait for itself, and the end of a process that
    was forked of this one has no such thread."""
    if thread.is_alive():
        ending = asyncio.run_coroutine_threadsafe(_end(workers), loop)
        ending.add_done_callback(lambda _: loop.stop())  # in that thread
        if thread is not threading.current_thread():
            thread.join(GRACE_S)


async def _end(workers: list[_Worker]) -> None:
    """Whoever still waits for an answer gets none: it would be logged as a failure."""
    reading = [worker.reading for worker in workers if worker.reading is not None]
    open_ = asyncio.all_tasks() - {asyncio.current_task(), *reading}
    for task in open_:
        task.cancel()
    await asyncio.gather(*open_, return_exceptions=True)
    running = [worker for worker in workers if worker.process is not None]
    for worker in running:
        worker.process.stdin.close()  # it then ends what it has started
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(worker.process.wait() for worker in running)), 1.0)
    for worker in running:
        await worker.kill()
    await asyncio.gather(*reading, return_exceptions=True)  # to the end, which closes the pipes
