"""Unchanged environments of OpenEnv: `environment.path=aligner.environments.openenv:OpenEnv`.

Each trajectory has a session of its own on a server that runs elsewhere. The model sees observations as JSON, or one of
their fields, and acts by one tool, whose fields the server describes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from aligner.errors import MissingExtraError

try:
    from openenv.core.generic_client import GenericEnvClient
except ImportError as cause:
    raise MissingExtraError("openenv", "openenv", "an environment of OpenEnv") from cause

MODELS_FAULT = "(code: VALIDATION_ERROR)"  # an action that does not fit the schema


class OpenEnv:
    """An environment behind an OpenEnv server.

    url: of the server. show: the field of an observation that the model sees; default: all of it. columns: of the row,
    for the environment's reset.
    """

    def __init__(self, url: str, show: str = "", columns: Sequence[str] = ()):
        self._url, self._show, self._columns = url.rstrip("/"), show, columns
        self._client = GenericEnvClient(base_url=url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done, self._reward = False, 0.0

    async def reset(self, seed: int, **row: Any) -> str:
        self._loop = asyncio.get_running_loop()
        result = await self._client.reset(seed=seed, **{name: row[name] for name in self._columns})
        async with httpx.AsyncClient() as http:
            schema = (await http.get(f"{self._url}/schema")).raise_for_status().json()["action"]
        fields = [_described(*field) for field in schema.get("properties", {}).items() if field[0] != "metadata"]
        return f"{self._shown(result.observation)}\nFields of an action: {'; '.join(fields)}"

    async def act(self, action: dict) -> str:
        """Take an action and tell what the environment shows then.

        Args:
            action: The fields of the action.
        """
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if MODELS_FAULT in str(error):
                raise ValueError(str(error)) from error
            raise
        self._reward += float(result.reward or 0.0)
        self.done = bool(result.done)
        return self._shown(result.observation)

    def turn_reward(self) -> float:
        gained, self._reward = self._reward, 0.0
        return gained

    def _shown(self, observation: dict[str, Any]) -> str:
        value = observation[self._show] if self._show else observation
        return value if isinstance(value, str) else json.dumps(value)

    def __del__(self) -> None:
        """Give the session back, of which servers have few."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(_close(self._client), self._loop)


async def _close(client: GenericEnvClient) -> None:
    await client.close()


def _described(name: str, schema: dict[str, Any]) -> str:
    kind = f" ({schema['type']})" if "type" in schema else ""
    about = f": {schema['description']}" if "description" in schema else ""
    return f"{name}{kind}{about}"
