"""Environments of verifiers, as they are: `environment.agent=aligner.environments.verifiers:play`.

They ask the model by OpenAI's chat API and score by themselves; a row of the data is one of theirs.
"""

from __future__ import annotations

import importlib
import json
import signal
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aligner.errors import MissingExtraError

try:
    import verifiers
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.envs import environment as its_module
except ImportError as cause:
    raise MissingExtraError("verifiers", "verifiers", "an environment of verifiers (0.2)") from cause

if TYPE_CHECKING:
    from aligner.environments.agents import Task

# an environment sets handlers when it is made, which only a main thread may; and a worker ignores signals for a reason
its_module.signal = SimpleNamespace(**vars(signal) | {"signal": lambda number, handler: None})
TIMEOUT_S = 3600.0  # of a reply: a turn may wait for many others


def load(env: str, args: dict[str, Any]) -> verifiers.Environment:
    """By the name of an installed environment, or module:Class."""
    module, colon, name = env.partition(":")
    if colon:
        return getattr(importlib.import_module(module), name)(**args)
    return verifiers.load_environment(env, **args)


@cache
def _loaded(env: str, args: str) -> verifiers.Environment:
    return load(env, json.loads(args))


async def play(
    task: Task, base_url: str, sampling: dict[str, Any], env: str, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The reward of one of its rollouts, with its metrics; None where it broke off."""
    made = _loaded(env, json.dumps(args or {}, sort_keys=True))
    row = {name: value for name, value in task.row.items() if name in ("answer", "info", "example_id")}
    settings = {name: value for name, value in sampling.items() if name != "model"}
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        given = {"example_id": 0, **row, "prompt": task.messages}
        found = await made.run_rollout(given, OpenAIChatCompletionsClient(client), sampling["model"], settings)
    return (found.get("metrics") or {}) | {"reward": None if found.get("error") else found["reward"]}
