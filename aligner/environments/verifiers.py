"""Unchanged environments of verifiers: `environment.agent=aligner.environments.verifiers:play`.

They call the model by OpenAI's chat API and compute the score; a row of the data is a row of theirs.
"""

from __future__ import annotations

import json
import signal
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aligner.errors import EnvironmentCodeError, MissingExtraError
from aligner.user_code import load as load_code

try:
    import verifiers
    from openai import AsyncOpenAI, BadRequestError
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.envs import environment as its_module
    from verifiers.errors import OverlongPromptError
except ImportError as cause:
    raise MissingExtraError("verifiers", "verifiers", "an environment of verifiers (0.2)") from cause

if TYPE_CHECKING:
    from aligner.environments.agents import Task

# an environment sets signal handlers when it is made, which only a main thread may; a worker must ignore signals
its_module.signal = SimpleNamespace(**vars(signal) | {"signal": lambda number, handler: None})
TIMEOUT_S = 3600.0  # of a reply: a turn may wait for many others


class BudgetClient(OpenAIChatCompletionsClient):
    """A client to which a trajectory without room for a further answer is a prompt that is too long.

    An environment scores what there is then.
    """

    async def get_native_response(self, *args: Any, **settings: Any) -> Any:
        try:
            return await super().get_native_response(*args, **settings)
        except BadRequestError as error:
            if str(error.code).startswith(("context_length_exceeded", "budget_of_")):
                raise OverlongPromptError from error
            raise


def load(env: str, args: dict[str, Any]) -> verifiers.Environment:
    """Load an environment by its installed name, or what makes it by module:name or path.py:name."""
    if ":" in env:
        return load_code(env, "environment.args.env", "function", EnvironmentCodeError)(**args)
    return verifiers.load_environment(env, **args)


@cache
def _loaded(env: str, args: str) -> verifiers.Environment:
    return load(env, json.loads(args))


async def play(
    task: Task, base_url: str, sampling: dict[str, Any], env: str, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the reward of one of its rollouts, with its metrics; None if it failed."""
    made = _loaded(env, json.dumps(args or {}, sort_keys=True))
    settings = {name: value for name, value in sampling.items() if name != "model"}
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        task_row = {"example_id": 0, **task.row, "prompt": task.messages}
        state = await made.run_rollout(task_row, BudgetClient(client), sampling["model"], settings)
    return (state.get("metrics") or {}) | {"reward": None if state.get("error") else state["reward"]}
