"""Clients of servers that score samples: concurrent within limits, with retries, and never twice for a logged
answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
import time
from asyncio import sleep
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import httpx

from aligner.answers import Answer, AnswerLog
from aligner.config.sections.servers import LimitsConfig
from aligner.errors import ConfigError, DataError, RewardError
from aligner.foreign import parse_json
from aligner.rewards.reply import Secret, read_reply
from aligner.types import Sample

# of requests whose tries all failed
CAUSES = ("unreachable", "timeout", "status", "refused", "malformed", "breaker")
AGAIN, NOT_THIS = (408, 429), (400, 413, 422)  # HTTP states besides 5xx to retry; those that refuse one request
FINAL = ("refused", "breaker")  # not tried again
BREAKER, REST_S = 5, 30.0  # failures in a row, after which no request is sent for REST_S
BYTES = 4  # of a request, counted as one token
_jitter = random.SystemRandom()  # nothing that a run computes sees it, and ranks that are forked differ


class RequestFailed(Exception):
    """A request without an answer; `cause` is one of CAUSES."""

    def __init__(self, cause: str, text: str, wait_s: float = 0.0):
        self.cause, self.wait_s = cause, wait_s
        super().__init__(text)


class Item(NamedTuple):
    """A question: its key and number in the log of answers (no key: not logged), and its JSON content."""

    key: str
    number: int
    content: dict[str, Any]


def item_key(*samples: Sample) -> str:
    """Return the key of a question about these samples; empty if they belong to no rollout."""
    seeds = [sample.seed for sample in samples]
    return "" if None in seeds else "/".join(map(str, seeds))


class RequestForm(Protocol):
    """A conversion of questions to a request and of its reply to answers."""

    size: int  # most questions of a request
    expected: str  # description of a reply, for messages
    reply_tokens: int  # most tokens of a reply

    def body(self, contents: Sequence[dict[str, Any]]) -> dict[str, Any]: ...

    def read(self, reply: Any, count: int) -> list[Any]:
        """Return `count` answers. Raises ValueError, TypeError or LookupError if the reply lacks them."""
        ...


@dataclass
class ServerRequest:
    """A request for several questions, and the addresses of its tries in turn, repeated."""

    connections: httpx.AsyncClient
    urls: list[str]
    items: Sequence[Item]
    body: bytes
    until: float

    def __post_init__(self) -> None:
        same = hashlib.sha256(self.body + repr([item[:2] for item in self.items]).encode()).hexdigest()
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip", "Idempotency-Key": same}


class Client:
    """A client of equal servers, which it asks in turn."""

    def __init__(self, urls: Sequence[str], limits: LimitsConfig, form: RequestForm):
        for url in urls or [""]:
            _check(url)
        self.secret = Secret(_key(limits.key_env))
        self.urls, self.limits, self.form = list(urls), limits, form
        self.log: AnswerLog | None = None
        self.name = ""  # of the reward, in the log's keys
        self.failure = ""  # the last failure
        self._certificates = httpx.create_ssl_context()  # read once
        self._lock = threading.Lock()
        self._row, self._open_until, self._free_at = 0, 0.0, 0.0  # failures in a row; the breaker; the rates
        self._counts = Counter[str]()

    def ask(self, items: Sequence[Item]) -> list[Any]:
        """Return the answer to each question, or a `RequestFailed`. Raises RewardError for errors that no further try
        can mend."""
        until = time.monotonic() + self.limits.deadline_s
        answers = [self._logged(item) for item in items]
        open_ = [i for i, answer in enumerate(answers) if answer is None]
        batches = [open_[start : start + self.form.size] for start in range(0, len(open_), self.form.size)]
        loop = asyncio.new_event_loop()
        try:
            asked = loop.run_until_complete(self._all([[items[k] for k in batch] for batch in batches], until))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())  # of replies that were not read to their end
            loop.close()  # without waiting for threads: the lookup of a name may take long
        for batch, replies in zip(batches, asked, strict=True):
            for index, answer in zip(batch, replies, strict=True):
                answers[index] = answer
        return [self._counted(answer) for answer in answers]

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """Return, of questions since the last call, how many failed for each cause, and how many retries there were."""
        counts, self._counts = self._counts, Counter()
        return {name: (float(counts[name]), float(counts["asked"])) for name in (*CAUSES, "retries")}

    def _logged(self, item: Item) -> Answer | None:
        if self.log is None or not item.key:
            return None
        return self.log.find(f"{self.name}/{item.key}", item.number, item.content)

    def _counted(self, answer: Answer | None) -> Any:
        """Count an answer, new or logged, and return its value or `RequestFailed`."""
        assert answer is not None
        self._counts.update({"asked": 1, "retries": answer["retried"]})
        if "failed" not in answer:
            return answer["value"]
        self._counts[answer["failed"]] += 1
        self.failure = f"{answer['failed']}: {answer['text']}"
        return RequestFailed(answer["failed"], answer["text"])

    async def _all(self, batches: Sequence[Sequence[Item]], until: float) -> list[list[Answer]]:
        """Send a request for each batch of questions. The first error cancels the others."""
        headers = {"Authorization": f"Bearer {self.secret.key}"} if self.secret.key else {}
        limits, room = httpx.Limits(max_connections=None), asyncio.Semaphore(self.limits.concurrency)

        async def one(number: int, items: Sequence[Item], connections: httpx.AsyncClient) -> list[Answer]:
            first = number % len(self.urls)
            async with room:
                body = json.dumps(self.form.body([item.content for item in items])).encode()
                urls = self.urls[first:] + self.urls[:first]
                return await self._answers(ServerRequest(connections, urls, items, body, until))

        # no limits of httpx: `until` bounds a request's time, the semaphore the number of requests
        async with httpx.AsyncClient(headers=headers, verify=self._certificates, limits=limits, timeout=None) as made:
            tasks = [asyncio.ensure_future(one(number, items, made)) for number, items in enumerate(batches)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answers(self, request: ServerRequest) -> list[Answer]:
        answers = await self._tries(request)
        for item, answer in zip(request.items, answers, strict=True):
            if self.log is not None and item.key:
                self.log.write(f"{self.name}/{item.key}", item.number, item.content, answer)
        return answers

    async def _tries(self, request: ServerRequest) -> list[Answer]:
        until = request.until
        for number in range(self.limits.retries + 1):
            try:
                await self._wait_turn(request.body, until)
                values = await self._tried(request, request.urls[number % len(request.urls)])
                return [{"value": value, "retried": number} for value in values]
            except RequestFailed as failed:
                last = failed.cause in FINAL or number == self.limits.retries or time.monotonic() >= until
                if last:
                    return [{"failed": failed.cause, "text": str(failed), "retried": number}] * len(request.items)
                pause_s = max(failed.wait_s, 0.2 * 2**number * _jitter.uniform(0.5, 1.5))  # not all ranks at once
            await sleep(max(0.0, min(pause_s, until - time.monotonic())))
        raise AssertionError(self.limits.retries)

    async def _wait_turn(self, body: bytes, until: float) -> None:
        """Wait until the breaker is closed and the rates leave room. Raises RequestFailed if that is after `until`."""
        while (now := time.monotonic()) < self._open_until:
            if self._open_until >= until:
                raise RequestFailed("breaker", f"not asked, after {BREAKER} failures in a row: {self.failure}")
            await sleep(self._open_until - now)
        tokens, limits = len(body) / BYTES + self.form.reply_tokens, self.limits
        rates = (1, limits.requests_per_minute), (tokens, limits.tokens_per_minute)
        seconds = max((60 * used / rate for used, rate in rates if rate), default=0.0)
        with self._lock:
            start = max(now, self._free_at)
            if start >= until:
                raise RequestFailed("timeout", f"not asked within deadline_s={self.limits.deadline_s:g}")
            self._free_at = start + seconds
        await sleep(max(0.0, start - now))

    async def _tried(self, request: ServerRequest, url: str) -> list[Any]:
        """Send a request once, and update the breaker.

        After its rest one more failure opens the breaker again; an answer closes it.
        """
        try:
            values = self._values(url, *await self._post(request, url), len(request.items))
        except RequestFailed as failed:
            with self._lock:
                self.failure = f"{failed.cause}: {failed}"
                self._row += failed.cause != "refused"
                if self._row >= BREAKER:
                    self._row, self._open_until = BREAKER - 1, time.monotonic() + REST_S
            raise
        with self._lock:
            self._row = 0
        return values

    async def _post(self, request: ServerRequest, url: str) -> tuple[httpx.Response, bytes]:
        """Return a reply and its body. One time limit covers all, from the name lookup to the last byte."""
        limit_s = max(0.001, min(self.limits.timeout_s, request.until - time.monotonic()))
        sent = {"content": request.body, "headers": request.headers}
        try:
            async with asyncio.timeout(limit_s), request.connections.stream("POST", url, **sent) as reply:
                return reply, await read_reply(reply)
        except TimeoutError:
            raise RequestFailed("timeout", f"{url}: no answer within {limit_s:.3g} s") from None
        except httpx.TransportError as error:
            why = f"{type(error).__name__}: {self.secret.shown(str(error))}"
            raise RequestFailed("unreachable", f"{url}: {why}") from None
        except ValueError as error:
            raise RequestFailed("malformed", f"{url}: {self.secret.shown(str(error))}") from None

    def _values(self, url: str, reply: httpx.Response, content: bytes, count: int) -> list[Any]:
        """Return the values in a reply. Raises RequestFailed, or RewardError for errors that a retry cannot mend."""
        status, shown = reply.status_code, repr(self.secret.shown(content))
        if status in AGAIN or status >= 500:
            wait = reply.headers.get("Retry-After", "")
            raise RequestFailed("status", f"{url}: HTTP {status} {shown}", float(wait) if wait.isdecimal() else 0.0)
        if status in NOT_THIS:
            raise RequestFailed("refused", f"{url}: HTTP {status} {shown}")
        if status != 200:
            raise RewardError(f"{url}: expected HTTP 200, found {status} {shown}")
        try:
            values = self.form.read(parse_json(content, url, DataError), count)
        except (DataError, ValueError, TypeError, LookupError):
            raise RequestFailed("malformed", f"{url}: expected {self.form.expected}, found {shown}") from None
        return [self.secret.kept(value) if isinstance(value, str) else value for value in values]


def _key(name: str) -> str:
    """Return the key in a variable of the environment. Raises ConfigError, which does not show the key."""
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        expected = "the name of an environment variable that holds a key of printable ASCII characters"
        raise ConfigError("key_env", name, expected)
    return key


def _check(url: str) -> None:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError("url", url, "http://host:port/path", f"{error}.") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError("url", url, "http://host:port/path")
    if parts.userinfo:  # not shown
        raise ConfigError("url", parts.host, "an address without a user: name the key's variable in key_env")
