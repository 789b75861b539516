"""The reward `http`: a server scores answers, in one of three public formats.

    openrlhf  {"query": [prompt + response], "prompts": [...], "labels": [...]} -> {"rewards": [...], ...}
    sample    {"prompt", "response", "label"}, one sample at a time (slime, miles) -> a number, or a mapping with one
    verify    NeMo-Gym's POST /verify: the row, its prompt and an OpenAI response object -> {"reward": ...}

A request is tried again where trying may help. One that fails at last is NaN, never 0: `rewards/base.py`, may_fail.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx

from aligner.config.checks import above, at_least, one_of
from aligner.errors import ConfigError, RewardError
from aligner.types import Sample

FORMATS = ("openrlhf", "sample", "verify")
CAUSES = ("unreachable", "timeout", "status", "malformed", "breaker")  # of requests that failed at last
BATCH = 16  # samples of a request in OpenRLHF's format
BREAKER, REST_S = 5, 30.0  # after so many failures in a row the server is left alone for so long
_jitter = random.Random()  # of its own: nothing that a run computes sees it


class Failed(Exception):
    """A request did not get an answer; `cause` is one of CAUSES."""

    def __init__(self, cause: str, text: str):
        self.cause = cause
        super().__init__(text)


class Http:
    """url: one or several of equal servers, asked in turn. label: the column sent as the label. key_env: the variable
    of the environment with a key, sent as a bearer token and written nowhere. timeout_s: of one try. deadline_s: of a
    rollout with all tries, below reward.timeout_s; what has no score by then is NaN."""

    may_fail: ClassVar[bool] = True

    def __init__(
        self,
        url: str | list[str],
        format: str = "openrlhf",
        label: str = "answer",
        key_env: str = "",
        concurrency: int = 16,
        timeout_s: float = 20.0,
        retries: int = 3,
        deadline_s: float = 50.0,
    ):
        one_of("format", format, FORMATS)
        at_least("concurrency", concurrency, 1)
        above("timeout_s", timeout_s, 0)
        at_least("retries", retries, 0)
        above("deadline_s", deadline_s, 0)
        self.urls = [url] if isinstance(url, str) else list(url)
        for one in self.urls or [""]:
            _check(one)
        if key_env and not os.environ.get(key_env):
            raise ConfigError("key_env", key_env, "the name of a variable of the environment, which has a key")
        headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}
        self.format, self.label, self.concurrency = format, label, concurrency
        self.retries, self.timeout_s, self.deadline_s = retries, timeout_s, deadline_s
        self._client = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=concurrency))
        self._lock = threading.Lock()
        self._row, self._open_until = 0, 0.0  # failures in a row; the breaker
        self._failure, self._counts = "", Counter[str]()

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        size, until = BATCH if self.format == "openrlhf" else 1, time.monotonic() + self.deadline_s
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            found = pool.map(
                lambda job: self._scores(job[1], self.urls[job[0] :] + self.urls[: job[0]], until),
                [(i % len(self.urls), part) for i, part in enumerate(parts)],
            )
            return [score for part in found for score in part]

    def failure(self) -> str:
        return self._failure

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """Of requests since the last call: how many failed for each cause, and how many tries came on top."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: (float(counts[name]), float(counts["requests"])) for name in (*CAUSES, "retries")}

    def _scores(self, part: Sequence[Sample], urls: list[str], until: float) -> list[float]:
        """`urls`: where the first try, the second, ... go, over and over."""
        body = json.dumps(self._body(part)).encode()
        try:
            scores = self._asked(body, urls, until, len(part))
        except Failed as failed:
            with self._lock:
                self._counts.update(("requests", failed.cause))
                self._failure = f"{failed.cause}: {failed}"
            return [math.nan] * len(part)
        with self._lock:
            self._counts["requests"] += 1
        return scores

    def _asked(self, body: bytes, urls: list[str], until: float, count: int) -> list[float]:
        """The scores. Raises Failed after the last try, RewardError for what asking again, or others, cannot mend."""
        for number in range(self.retries + 1):
            left_s, url = until - time.monotonic(), urls[number % len(urls)]
            if time.monotonic() < self._open_until:
                raise Failed("breaker", f"not asked, after {BREAKER} failures in a row: {self._failure}")
            if left_s <= 0:
                raise Failed("timeout", f"{url}: no score within args.deadline_s={self.deadline_s:g}")
            try:
                scores = self._post(url, body, min(self.timeout_s, left_s), count)
            except Failed as failed:
                self._tell(good=False)
                if number == self.retries or failed.cause == "malformed":
                    raise
            else:
                self._tell(good=True)
                return scores
            with self._lock:
                self._counts["retries"] += 1
            pause_s = 0.2 * 2**number * _jitter.uniform(0.5, 1.5)  # so that not all ranks come again at once
            time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        raise AssertionError(self.retries)

    def _tell(self, good: bool) -> None:
        """The breaker: after its rest one more failure opens it again, an answer closes it."""
        with self._lock:
            self._row = 0 if good else self._row + 1
            if self._row >= BREAKER:
                self._row, self._open_until = BREAKER - 1, time.monotonic() + REST_S  # one more failure: again

    def _post(self, url: str, body: bytes, timeout_s: float, count: int) -> list[float]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": hashlib.sha256(body).hexdigest()}
        try:
            reply = self._client.post(url, content=body, headers=headers, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise Failed("timeout", f"{url}: no answer within {timeout_s:.3g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise Failed("unreachable", f"{url}: {type(error).__name__}: {error}") from error
        if reply.status_code in (408, 429) or reply.status_code >= 500:
            raise Failed("status", f"{url}: HTTP {reply.status_code} {reply.text[:200]!r}")
        if reply.status_code != 200:
            raise RewardError(f"{url}: expected HTTP 200, found {reply.status_code} {reply.text[:200]!r}")
        try:
            scores = self._read(json.loads(reply.content))
        except (ValueError, RecursionError, TypeError, KeyError):
            scores = []
        if len(scores) != count or not all(map(math.isfinite, scores)):
            expected = f"{count} finite scores in the format {self.format}"
            raise Failed("malformed", f"{url}: expected {expected}, found {reply.text[:200]!r}")
        return scores

    def _read(self, answer: Any) -> list[float]:
        if self.format == "openrlhf":
            return [float(value) for value in answer["rewards"]]
        if self.format == "verify":
            return [float(answer["reward"])]
        if isinstance(answer, dict):
            answer = answer["reward"] if "reward" in answer else answer["score"]
        return [float(answer)]

    def _body(self, part: Sequence[Sample]) -> dict[str, Any]:
        labels = [sample.prompt.fields.get(self.label) for sample in part]
        if self.format == "openrlhf":
            texts = [sample.prompt.text for sample in part]
            query = [sample.prompt.text + sample.response for sample in part]
            return {"query": query, "prompts": texts, "labels": labels}
        ((sample, label),) = zip(part, labels, strict=True)
        prompt = sample.prompt
        asked = prompt.text if prompt.messages is None else list(prompt.messages)
        if self.format == "sample":
            return {"prompt": asked, "response": sample.response, "label": label}
        columns = {name: value for name, value in prompt.fields.items() if name not in ("messages", "tools")}
        return {**columns, "responses_create_params": {"input": asked}, "response": _response(sample)}


def _check(url: str) -> None:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError("url", url, "http://host:port/path", f"{error}.") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError("url", url, "http://host:port/path")
    if parts.userinfo:  # not shown
        raise ConfigError("url", parts.host, "an address without a user: a key's place is args.key_env")


def _response(sample: Sample) -> dict[str, Any]:
    """An OpenAI response object with one message of the assistant's."""
    text = {"type": "output_text", "text": sample.response, "annotations": []}
    name = f"{sample.prompt.id}-{sample.index}"
    message = {"id": f"msg-{name}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    kept = {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    return {"id": name, "object": "response", "created_at": 0, "model": "policy", "output": [message], **kept}
