"""The form of a run: keys with docs and choices, the resolved config, the command line for it, and its plan.

For a wrong value the page shows the error that the command line prints. Imports no torch.
"""

from __future__ import annotations

import argparse
import re
import shlex
import threading
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

from aligner.board.runs import Board
from aligner.cluster.site import find_site
from aligner.cluster.site import names as sites
from aligner.config.checks import one_of
from aligner.config.freeze import to_yaml
from aligner.config.identity import uses
from aligner.config.options import GROUPS, from_plain, key_type
from aligner.config.reference import keys
from aligner.config.resolve import compose, quoted
from aligner.config.schema import Config
from aligner.config.unread import refuse_unread
from aligner.config.validate import validate
from aligner.errors import AlignerError, ConfigError
from aligner.files import conf_dir
from aligner.foreign import JsonObject
from aligner.plan import options as plan_options
from aligner.plan.command import predicted
from aligner.plan.devices import DEVICES
from aligner.plan.memory import refuse

_PLAIN = re.compile(r"[A-Za-z_./][\w./@:+-]*", re.ASCII)  # what Hydra reads as a text without quotes
_NO_TEXT = ("true", "false", "null", "nan", "inf", "yes", "no", "on", "off")
_hydra = threading.Lock()  # its state is the process's


@dataclass(frozen=True)
class RunForm:
    """Values of the form."""

    groups: dict[str, str] = field(default_factory=dict)  # options of the folders of conf/
    values: dict[str, str] = field(default_factory=dict)  # by key, as typed; lists and mappings in Hydra's syntax
    command: str = "launch"  # or submit
    ranks: int = 1  # of `launch`
    site: str = ""  # of `submit`, like the next two; empty: as `submit` finds it
    nodes: int = 1
    ranks_per_node: int = 0  # 0: the site's
    gpus: int = 8  # of `plan`, like the next two
    gpus_per_node: int = 8
    device: str = "h100"

    @classmethod
    def read(cls, request: JsonObject) -> RunForm:
        """Read the form's values. Raises ConfigError."""
        wish = from_plain(cls, request.fields, "", cls)
        one_of("command", wish.command, ("launch", "submit"))
        return wish

    def overrides(self) -> list[str]:
        chosen = [f"{group}={option}" for group, option in self.groups.items() if option]
        return chosen + [f"{key}={_typed(key, text)}" for key, text in self.values.items()]

    def argv(self, *options: str) -> list[str]:
        """Return the arguments of `python -m aligner`, with further `options`."""
        if self.command == "launch":
            return ["launch", *options, "--ranks", str(self.ranks), *self.overrides()]
        sizes = {"--site": self.site, "--nodes": self.nodes, "--ranks-per-node": self.ranks_per_node}
        words = [word for name, value in sizes.items() if value for word in (name, str(value))]
        return ["submit", *options, *words, *self.overrides()]

    def world_size(self) -> int:
        """Return the number of ranks. Raises ConfigError."""
        if self.command == "launch":
            return self.ranks
        return self.nodes * (self.ranks_per_node or find_site(self.site)[1].ranks)

    def plan_options(self) -> list[str]:
        return ["--gpus", str(self.gpus), "--gpus-per-node", str(self.gpus_per_node), "--device", self.device]


def _typed(key: str, text: str) -> str:
    """Quote a text where Hydra's grammar has other uses for it. Hydra reads values of other kinds as they are."""
    if key_type(key) is not str or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    return quoted(text)


def shown(value: Any) -> str:
    """Return a value as the form's fields show it."""
    if isinstance(value, str):
        return value
    return _written(value)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT else quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_written(inner)}' for key, inner in value.items())}}}"
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else repr(value)


def composed(wish: RunForm) -> Config:
    """Resolve the config. Raises ConfigError."""
    with _hydra:
        return compose(wish.overrides())


def form(board: Board, request: JsonObject) -> dict[str, Any]:
    """Return the form's fields, which never change while this process lives."""
    groups = {group: sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")) for group in GROUPS}
    return {
        "groups": groups,
        "keys": [asdict(key) for key in keys(whole=True)],
        "sites": sites(),
        "devices": list(DEVICES),
    }


def check(board: Board, request: JsonObject) -> dict[str, Any]:
    """Return the command of a wish and what it would print.

    `error`: {"key", "text"} as the command would print it, or None; `base`: the values by key from the groups alone;
    `yaml`: the resolved config, where there is one; `unread`: keys that this stage does not read; `plan`: {"command",
    "table", "error"}."""
    wish = RunForm.read(request)
    plan = {"command": _line("plan", *wish.plan_options(), *wish.overrides()), "table": "", "error": ""}
    answer: dict[str, Any] = {"command": _line(*wish.argv()), "base": {}, "yaml": "", "error": None, "unread": []}
    try:
        answer["base"] = _by_key(composed(RunForm(wish.groups)))
        cfg = composed(wish)
    except AlignerError as error:
        return answer | {"error": _error(error), "plan": plan}
    answer |= {"yaml": to_yaml(cfg), "plan": plan | _plan(wish, cfg)}
    answer["unread"] = [key.name for key in keys(whole=True) if not uses(cfg.stage.name, key.name)]
    try:
        if (ranks := wish.world_size()) < 1:
            raise ConfigError("--ranks" if wish.command == "launch" else "--nodes", ranks, "a number >= 1")
        with _hydra:
            refuse_unread(cfg, wish.overrides())
        validate(cfg, ranks)
    except AlignerError as error:
        answer["error"] = _error(error)
    return answer


def _line(*argv: str) -> str:
    return shlex.join(["python", "-m", "aligner", *argv])


def _by_key(cfg: Config) -> dict[str, str]:
    plain = asdict(cfg)
    names = [key.name for key in keys(whole=True) if "[]" not in key.name]
    return {name: shown(reduce(getitem, name.split("."), plain)) for name in names}


def _error(error: AlignerError) -> dict[str, str]:
    """Return the error with its key. For a value that Hydra cannot read the key is that of the override."""
    key = error.key if isinstance(error, ConfigError) else ""
    if key == "override":
        key = str(error.value).partition("=")[0]
    return {"key": key, "text": f"error: {error}"}


def _plan(wish: RunForm, cfg: Config) -> dict[str, str]:
    """Return the plan's table, also beside the error for a job that does not fit, as in the terminal."""
    parser = argparse.ArgumentParser()
    plan_options.add_arguments(parser)
    args = parser.parse_args(wish.plan_options())
    table = ""
    try:
        prediction = predicted(args, cfg)
        table = prediction.text()
        refuse(prediction.job, prediction.device, prediction.memory)
    except AlignerError as error:
        return {"table": table, "error": f"error: {error}"}
    return {"table": table, "error": ""}
