"""Rewards that are plain Python functions, loaded from a path in the config.

`reward.functions[i].path` is one of
    a built-in name       math, exact_match, format, length, reasoning_gym
    module:function       imported as Python would
    path/to/file.py:function

and the function has one of two signatures, with `reward.functions[i].args` as further keyword arguments:

    def f(samples, **args) -> list[float | None]                      # samples: list[aligner.types.Sample]
    def f(prompts, completions, **columns) -> list[float | None]      # the convention of TRL

or is a class that is instantiated once, with args, and then called like the first. Either may be `async def`: functions
run concurrently on threads, and each call has its own event loop.

The second is used when the function has a parameter `completions`. Prompts and completions are texts, or, if the row's
prompt is a conversation, lists of messages. A completion is one assistant message, or with environments all messages
of a trajectory (docs/reference/environments.md). Each other parameter is the dataset column of that name (a list, None
where a row lacks it), `completion_ids` (token lists), or an entry of args. Only the columns it names are passed, or all
of them if it takes **keywords.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aligner.config.sections.rewards import RewardFunctionConfig
from aligner.errors import AlignerError, ConfigError, RewardError, RewardPathError, UnknownKeyError
from aligner.rewards.base import Reward, check_scores, describe
from aligner.types import Prompt, Sample
from aligner.user_code import load

BUILT_IN = {
    "math": "aligner.rewards.verifiable:math",
    "exact_match": "aligner.rewards.verifiable:exact_match",
    "format": "aligner.rewards.verifiable:format",
    "length": "aligner.rewards.verifiable:length",
    "reasoning_gym": "aligner.rewards.reasoning_gym:reasoning_gym",
    "code": "aligner.rewards.code:Code",
    "http": "aligner.rewards.http:Http",
}


class FunctionReward:
    """A user's function as a Reward: its scores are checked, its exceptions traced to the sample that causes them."""

    main_thread = False

    def __init__(self, function: Callable, name: str, args: dict[str, Any], key: str):
        self.function, self.name, self.args, self.key = function, name, args, key
        self.per_sample = bool(getattr(function, "per_sample", False))
        self.late_score: float | None = getattr(function, "late_score", None)
        self.bounded = bool(getattr(function, "bounded", False))
        self.best_score: float = getattr(function, "best_score", math.inf)
        self.may_fail = bool(getattr(function, "may_fail", False))
        self.checks_rows = hasattr(function, "unreadable")
        self.failure: Callable[[], str] = getattr(function, "failure", lambda: "no score in time")
        if hasattr(function, "take_counts"):
            self.take_counts = function.take_counts
        if hasattr(function, "keep_answers"):
            self.keep_answers = function.keep_answers
        self._parameters = inspect.signature(function).parameters
        self._columns = "completions" in self._parameters
        self._check_args()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return one score per sample. Raises RewardError, naming the sample, if the function raises or returns no
        score."""
        if not samples:
            return []
        try:
            values = self._call(samples)
        except BaseException as cause:  # the user's code may raise anything, SystemExit included (code that a model
            # wrote and a reward runs); it is named, chained and never swallowed
            raise self._trace(samples, cause) from cause
        return check_scores(self.name, values, samples, self.may_fail)

    def unreadable(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Return by index why this function cannot score rows. Only for functions that `checks_rows`."""
        return self.function.unreadable(prompts, **self.args)  # type: ignore[attr-defined]

    def _call(self, samples: Sequence[Sample]) -> Any:
        if not self._columns:
            values = self.function(list(samples), **self.args)
        else:
            values = self.function(**{**self._table(samples), **self.args})
        return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values

    def _table(self, samples: Sequence[Sample]) -> dict[str, list]:
        table: dict[str, list] = {
            column: [s.prompt.fields.get(column) for s in samples] for s in samples for column in s.prompt.fields
        }
        table["prompts"] = [s.prompt.text if s.prompt.messages is None else list(s.prompt.messages) for s in samples]
        table["completions"] = [_completion(sample) for sample in samples]
        table["completion_ids"] = [list(s.tokens) for s in samples]
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            return table
        return {name: column for name, column in table.items() if name in self._parameters}

    def _trace(self, samples: Sequence[Sample], cause: BaseException) -> RewardError:
        """Score the samples one by one to find one that raises alone, and name it."""
        where = f"a batch of {len(samples)} samples (each scored alone, none raises)"
        for sample in samples:
            try:
                self._call([sample])
            except BaseException as alone:
                where, cause = describe(sample), alone
                break
        text = str(cause) if isinstance(cause, AlignerError) else f"{type(cause).__name__}: {cause}"
        return RewardError(f"reward `{self.name}` ({self.key}.path) raised on {where}: {text}")

    def _check_args(self) -> None:
        """Refuse config args that the function does not take, and parameters without a value, before any call."""
        known = list(self._parameters)[0 if self._columns else 1 :]  # the first one of a native function is the samples
        if not any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            unknown = sorted(self.args.keys() - known)
            if unknown:
                raise RewardPathError(
                    f"{self.key}.args.{unknown[0]}={self.args[unknown[0]]!r}: expected a parameter of `{self.name}`, "
                    f"which has {', '.join(known) or 'none'}"
                )
        if self._columns:
            return  # a missing argument may be a column, which is known at the call
        try:
            inspect.signature(self.function).bind([], **self.args)
        except TypeError as cause:
            raise RewardPathError(
                f"{self.key}.args={self.args!r}: expected what `{self.name}(samples, ...)` needs: {cause}"
            ) from cause


async def _awaited(values: Awaitable) -> Any:
    return await values


def _completion(sample: Sample) -> str | list[dict[str, Any]]:
    if sample.trajectory is not None:
        return list(sample.trajectory.messages)
    return sample.response if sample.prompt.messages is None else [{"role": "assistant", "content": sample.response}]


def load_function(config: RewardFunctionConfig, index: int = 0) -> Reward:
    """Load the reward of entry `index` of reward.functions. Raises RewardPathError, naming the entry, if it cannot be
    imported."""
    key = f"reward.functions[{index}]"
    path = BUILT_IN.get(config.path, config.path)
    function = load(path, f"{key}.path", "function", RewardPathError, f", or one of {', '.join(BUILT_IN)}")
    own = config.path if config.path in BUILT_IN else getattr(function, "__name__", type(function).__name__)
    name, args = config.name or own, dict(config.args)
    if inspect.isclass(function):
        function, args = _made(function, args, key), {}
    return FunctionReward(function, name, args, key)


def _made(kind: type, args: dict[str, Any], key: str) -> Callable:
    try:
        inspect.signature(kind).bind(**args)
    except TypeError as cause:
        expected = f"expected what `{kind.__name__}{inspect.signature(kind)}` takes: {cause}"
        raise RewardPathError(f"{key}.args={args!r}: {expected}") from cause
    try:
        return kind(**args)
    except UnknownKeyError as error:
        raise RewardPathError(f"{key}.args: {error}") from error
    except ConfigError as error:
        raise RewardPathError(f"{key}.args.{error}") from error
