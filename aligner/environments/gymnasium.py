"""Unchanged environments of Gymnasium: `environment.path=aligner.environments.gymnasium:Gymnasium`.

The model sees the environment rendered as text (`render_mode="ansi"`), else its observation, and acts by one tool.
The rewards of its steps are the rewards of turns. Colours, which mark a position in such texts, become brackets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aligner.errors import MissingExtraError

try:
    import gymnasium
except ImportError as cause:
    raise MissingExtraError("gymnasium", "gymnasium", "an environment of Gymnasium") from cause


class Gymnasium:
    """An environment of Gymnasium.

    id: in Gymnasium's registry, or module:id of another package's. actions: names of a discrete space's actions, in its
    order; default: their numbers. options: further arguments of the environment.
    """

    def __init__(self, id: str, actions: Sequence[str] = (), options: dict[str, Any] | None = None):
        self._made = gymnasium.make(id, **{"render_mode": "ansi"} | (options or {}))
        space = self._made.action_space
        if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            raise TypeError(f"{id}: expected discrete actions, or texts, found {space}")
        self._names = [] if isinstance(space, gymnasium.spaces.Text) else [str(name) for name in actions]
        if isinstance(space, gymnasium.spaces.Discrete):
            first, count = int(space.start), int(space.n)
            self._names = self._names or [str(first + i) for i in range(count)]
            if len(self._names) != count:
                raise ValueError(f"{id}: expected {count} names of actions, found {len(self._names)}")
            self._first = first
        self.done, self._reward = False, 0.0

    def reset(self, seed: int, **row: Any) -> str:
        observation, _ = self._made.reset(seed=seed)
        actions = f"\nActions: {', '.join(self._names)}" if self._names else ""
        return f"{self._shown(observation)}{actions}"

    def act(self, action: str) -> str:
        """Take an action and tell what the environment shows then.

        Args:
            action: The action, by its name.
        """
        if self._names and action not in self._names:
            raise ValueError(f"{action!r} is none of {', '.join(self._names)}")
        taken = self._first + self._names.index(action) if self._names else action
        observation, reward, ended, cut, _ = self._made.step(taken)
        self._reward += float(reward)
        self.done = bool(ended or cut)
        return self._shown(observation)

    def turn_reward(self) -> float:
        gained, self._reward = self._reward, 0.0
        return gained

    def _shown(self, observation: Any) -> str:
        rendered = self._made.render() if self._made.render_mode == "ansi" else None
        text = rendered if isinstance(rendered, str) else str(observation)
        return re.sub(r"\x1b\[[1-9][\d;]*m", "[", text).replace("\x1b[0m", "]")
