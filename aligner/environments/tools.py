"""Tools that a model may call: functions, and public methods of an environment's class, described by JSON schemas.

class Wordle:
    def reset(self, seed: int, **row) -> str | list[Message] | None   the same seed for all samples of a group
    def guess(self, word: str) -> str                                 a tool: type hints, and a docstring with `Args:`
    def turn_reward(self) -> float | None                             optional, after each turn that called tools
    def get_reward(self) -> float | None                              optional, at the end; None: the sample is invalid
    most_mb(**args) -> int                                            optional class method: MiB that one may take
    check(**args)                                                     optional class method: refuses environment.args
    def run_agent, end_agent; listens, listener                       optional, for environment.agent: see Terminal
    done = False                                                      optional: True ends the trajectory
"""

from __future__ import annotations

import inspect
import shutil
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.openai_api import require_server
from aligner.errors import AlignerError, EnvironmentCodeError
from aligner.user_code import load

HOOKS = ("reset", "turn_reward", "get_reward", "run_agent", "end_agent")  # public methods of a class that are not tools


@dataclass(frozen=True)
class Tools:
    functions: dict[str, Callable] = field(default_factory=dict)
    kind: type | None = None  # of the environment
    agent: bool = False  # the environment is an agent, which calls the model
    reward: Callable | None = None  # that scores environments instead of their `get_reward`

    @property
    def methods(self) -> dict[str, Callable]:
        of_class = self.kind is not None and not self.agent  # an agent has tools of its own
        members = inspect.getmembers(self.kind, inspect.isfunction) if of_class else []
        return {name: method for name, method in members if not name.startswith("_") and name not in HOOKS}

    @property
    def scores(self) -> bool:
        """Whether it has a reward."""
        return self.agent or self.reward is not None or any(hasattr(self.kind, name) for name in HOOKS[1:3])


def load_agent(cfg: EnvironmentConfig) -> Callable | None:
    """Load the function of environment.agent; None for a command line. Raises EnvironmentCodeError."""
    if not cfg.command:
        return load(cfg.agent, "environment.agent", "function", EnvironmentCodeError, " or a command line")
    if not cfg.path and shutil.which(cfg.command[0]) is None:
        expected = f"a command line of a program: `{cfg.command[0]}` was not found"
        raise EnvironmentCodeError(f"environment.agent={cfg.agent!r}: expected {expected}")
    return None


def load_tools(cfg: EnvironmentConfig) -> Tools:
    """Load the tools. Raises EnvironmentCodeError for failed imports, two tools of one name, or a class without
    `reset`."""
    if cfg.agent:
        require_server(f"environment.agent={cfg.agent}")
        load_agent(cfg)
        return Tools(kind=_load_class(cfg) if cfg.path else None, agent=True)
    functions: dict[str, Callable] = {}
    for i, path in enumerate(cfg.tools):
        key = f"environment.tools[{i}]"
        function = load(path, key, "function", EnvironmentCodeError)
        name = getattr(function, "__name__", path.rpartition(":")[2])
        if name in functions:
            raise EnvironmentCodeError(f"{key}={path!r}: expected another name than `{name}`, which another tool has")
        functions[name] = function
    if not cfg.path:
        return Tools(functions)
    kind = _load_class(cfg)
    tools = Tools(functions, kind, reward=_load_reward(cfg) if cfg.reward else None)
    if double := sorted(functions.keys() & tools.methods.keys()):
        expected = f"methods of other names than environment.tools: `{double[0]}` is both"
        raise EnvironmentCodeError(f"environment.path={cfg.path!r}: expected {expected}")
    return tools


def _load_class(cfg: EnvironmentConfig) -> type:
    kind = load(cfg.path, "environment.path", "Class", EnvironmentCodeError)
    if not inspect.isclass(kind) or not callable(getattr(kind, "reset", None)):
        expected = "a class with a method reset(self, seed, **row)"
        raise EnvironmentCodeError(f"environment.path={cfg.path!r}: expected {expected}, found none in `{kind!r}`")
    if cfg.agent and not hasattr(kind, "run_agent"):
        expected = "aligner.environments.terminal:Terminal, or a class derived from it, with environment.agent"
        raise EnvironmentCodeError(f"environment.path={cfg.path!r}: expected {expected}")
    if inspect.ismethod(getattr(kind, "check", None)):
        try:
            kind.check(**cfg.args)
        except (TypeError, AlignerError) as cause:
            raise EnvironmentCodeError(f"environment.args={cfg.args!r}: {cause}") from cause
    return kind


def _load_reward(cfg: EnvironmentConfig) -> Callable:
    key = "environment.reward"
    function = load(cfg.reward, key, "function", EnvironmentCodeError)
    try:
        inspect.signature(function).bind(environments=[])
    except TypeError as cause:
        expected = "a function that can be called with `environments` alone"
        raise EnvironmentCodeError(f"{key}={cfg.reward!r}: expected {expected}: {cause}") from cause
    return function


def schemas(tools: Tools) -> list[dict[str, Any]]:
    """Return the JSON schemas for chat templates, made by transformers.

    Raises EnvironmentCodeError for a missing type hint or docstring.
    """
    bound = [types.MethodType(method, object()) for method in tools.methods.values()]  # without `self`
    return [_schema(function) for function in (*tools.functions.values(), *bound)]


def _schema(function: Callable) -> dict[str, Any]:
    from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as cause:
        name = getattr(function, "__name__", str(function))
        raise EnvironmentCodeError(
            f"environment: the tool `{name}`: expected a type hint and a line below `Args:` for each of its arguments, "
            f"and a docstring that says what it does ({cause})"
        ) from cause


def misfit(value: Any, schema: dict[str, Any]) -> str:
    """Return why a model's value does not match a JSON schema of `get_json_schema`; or ""."""
    if "anyOf" in schema:
        causes = [misfit(value, one) for one in schema["anyOf"]]
        return "" if "" in causes else causes[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"{value!r} is none of {', '.join(map(str, schema['enum']))}"
    kinds: str | Sequence[str] = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if value is None and schema.get("nullable"):
        return ""
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{value!r} is no {' or '.join(kinds)}"
    items = value if isinstance(value, list) else []
    return next((why for item in items if (why := misfit(item, schema.get("items", {})))), "")


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    known = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return kind not in known or isinstance(value, known[kind])
