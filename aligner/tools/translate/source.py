"""A file of another trainer as names and values: a YAML file, a shell script, or arguments."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.errors import ConfigError
from aligner.tools.translate.shell import Script, arguments

EXPECTED = (
    "a config of TRL (YAML with fields of GRPOConfig, SFTConfig, ...), OpenRLHF (a command of openrlhf.cli) or veRL "
    "(YAML, or key=value arguments of verl.trainer)"
)
_TRAINER = re.compile(r"^(?:verl\.trainer\.\w+|openrlhf\.cli\.\w+|trl|(?:\S*/)?(?:trl|examples)/scripts/\w+\.py)$")
_NAMED = re.compile(r"verl\.trainer\.\w+|openrlhf\.cli\.\w+")
_VERL = re.compile(r"^[+~]{0,2}(actor_rollout_ref|algorithm|critic|data|trainer|reward_model|reward)[\w.@/]*=")
TRL_COMMANDS = ("sft", "dpo", "reward", "kto", "grpo", "rloo")
_TRL = re.compile(rf"\btrl\s+(?:{'|'.join(TRL_COMMANDS)})\b|scripts/\w+\.py")


@dataclass(frozen=True)
class Source:
    project: str  # trl, openrlhf or verl
    command: str  # sft, main_ppo, train_dpo, ...; empty: not in the file
    values: dict[str, Any]
    added: frozenset[str] = frozenset()  # names with Hydra's `+`
    assumed: dict[str, str] = field(default_factory=dict)  # variables of branches of a script

    def named_command(self, asked: str, known: Collection[str]) -> str:
        """Return the command that is asked for, or else the file's; empty: neither names one. Raises ConfigError."""
        command = asked or self.command
        if command and command not in known:
            raise ConfigError("--command", command, "one of " + ", ".join(known))
        return command


def read(path: str) -> Source:
    """Read a file, or standard input for `-`. Raises ConfigError for what is no config of these trainers."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", path, "a text file that can be read", str(error)) from None
    if not path.endswith((".sh", ".txt")) and isinstance(tree := _yaml(path, text), dict):
        return _of_yaml(path, tree)
    if _NAMED.search(text) or _TRL.search(text):
        return _of_script(path, text)
    return _of_words("", "", shlex.split(text.replace("\\\n", " "), comments=True), path)


def _yaml(path: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        if path.endswith((".yaml", ".yml")):
            mark = getattr(error, "problem_mark", None)
            where = f"{path}, line {mark.line + 1}" if mark else path
            raise ConfigError("FILE", where, "valid YAML", str(getattr(error, "problem", error))) from None
        return None


def _of_yaml(path: str, tree: dict[str, Any]) -> Source:
    if "actor_rollout_ref" in tree or {"data", "trainer"} <= set(tree):
        tree = {name: value for name, value in tree.items() if name not in ("hydra", "defaults")}
        try:
            plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError("FILE", path, "interpolations of keys in this file", str(error).split("\n")[0]) from None
        assert isinstance(plain, dict)
        return Source("verl", "main_ppo" if "actor_rollout_ref" in tree else "sft_trainer", flat(plain))
    nested = [name for name, value in tree.items() if isinstance(value, dict) and not name.endswith("kwargs")]
    if set(nested) - {"env", "dataset_mixture"} or not all(isinstance(name, str) for name in tree):
        raise ConfigError("FILE", path, EXPECTED, f"Its sections {', '.join(map(str, nested))} are none of theirs.")
    return Source("trl", "", {name: value for name, value in tree.items() if name != "env"})


def _of_script(path: str, text: str) -> Source:
    script = Script(text)
    for words in script.commands(_TRAINER):
        name = next(word for word in words if _TRAINER.search(word))
        rest = arguments(words, _TRAINER)
        if name == "trl":
            if rest[:1] and rest[0] in TRL_COMMANDS:
                return replace(_of_words("trl", rest[0], rest[1:], path), assumed=script.assumed)
            continue
        stem = Path(name).stem if name.endswith(".py") else name.rpartition(".")[2]
        project = "trl" if name.endswith(".py") else name.partition(".")[0]
        return replace(_of_words(project, stem, rest, path), assumed=script.assumed)
    raise ConfigError("FILE", path, "a script with one command of openrlhf.cli, verl.trainer or trl", EXPECTED)


def _of_words(project: str, command: str, words: list[str], path: str) -> Source:
    if project == "verl" or (not project and any(_VERL.match(word) for word in words)):
        added = frozenset(word.partition("=")[0].lstrip("+") for word in words if word.startswith("+"))
        return Source("verl", command or "main_ppo", _assignments(words), added)
    options = _options(words, path)
    if project == "trl" and isinstance(options.get("config"), str):
        below = read(str(Path(path).parent / options.pop("config")))
        options = below.values | options
    if not options:
        raise ConfigError("FILE", path, EXPECTED)
    return Source(project or "openrlhf", command, options)


def _assignments(words: list[str]) -> dict[str, Any]:
    """Return Hydra's overrides by name. The name of the config file is the value of `--config-name`."""
    values: dict[str, Any] = {}
    for at, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in ("--config-name", "-cn"):
            values["--config-name"] = text if equals else words[at + 1]
        elif equals and not name.startswith(("-", "~")):
            values[name.lstrip("+")] = _plain(text)
    return flat(values)


def _options(words: list[str], path: str) -> dict[str, Any]:
    """Return `--name value ...`, `--name=value` and `--flag` by name; several values as a list."""
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = _plain(text) if equals else True
        elif not name:
            raise ConfigError("FILE", path, EXPECTED, f"It begins with {word!r}.")
        elif values[name] is True:
            values[name] = _plain(word)
        else:
            before = values[name]
            values[name] = [*(before if isinstance(before, list) else [before]), _plain(word)]
    return values


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text and (":" in text or not text.startswith("{")) else text
    except yaml.YAMLError:
        return text


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted names, without the classes that Hydra would build and without values that are to be set."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        elif name != "_target_" and value != "???":
            values[f"{prefix}{name}"] = value
    return values
