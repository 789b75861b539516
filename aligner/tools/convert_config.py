"""`aligner convert-config`: a config of another trainer as an experiment of ours, and a report of what became of it."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from aligner.config.options import hints
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.config.unread import compose_run
from aligner.config.validate import validate_values
from aligner.errors import ConfigError
from aligner.files import conf_dir
from aligner.tools.recipes import DEVICE, GPUS_PER_NODE, plan_of
from aligner.tools.translate import openrlhf_settings, trl_settings, verl_settings
from aligner.tools.translate.sheet import Setting, Sheet, text
from aligner.tools.translate.source import Source, read

TRANSLATIONS: dict[str, Callable[[Source, str, int], Sheet]] = {
    "trl": trl_settings.translate,
    "openrlhf": openrlhf_settings.translate,
    "verl": verl_settings.translate,
}
_LAYOUT = ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert")


def main(args: argparse.Namespace) -> int:
    """Run `aligner convert-config`. Raises ConfigError for bad input, and for a result that this project refuses."""
    if args.overrides:
        raise ConfigError("FILE", args.overrides[0], "one file")
    source = read(args.file)
    sheet = TRANSLATIONS[source.project](source, args.command_of, args.gpus)
    sheet.finish()
    for variable, value in source.assumed.items():
        sheet.without[f"${variable}={value}"] = "of the script's first branch that sets it; no branch is followed"
    name = _name(args, source.project)
    sheet.settings.setdefault("run.name", Setting(name, [], False))
    _lay_out(sheet, args.file)
    document = experiment(sheet, args.file)
    print(f"{document}{report(sheet, name, args.out)}", end="")
    checked(sheet, document)
    path = Path(args.out) / "experiment" / f"{name}.yaml"
    if path.exists() and path.read_text(encoding="utf-8") != document:
        raise ConfigError("--name", name, f"another name, or another --out: {path} differs from this translation")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document, encoding="utf-8")
    return 0


def _name(args: argparse.Namespace, project: str) -> str:
    """Return the experiment's name, which is none of this project's."""
    name = args.name or re.sub(r"\W+", "_", Path(args.file).stem).strip("_") or "converted"
    if not (conf_dir() / "experiment" / f"{name}.yaml").exists():
        return name
    if args.name:
        raise ConfigError("--name", name, "another name than those of conf/experiment")
    return f"{name}_{project}"


def checked(sheet: Sheet, document: str) -> Config:
    """Return the config of an experiment. Raises ConfigError for what a run would refuse, except for lacking files."""
    cfg = _composed(document)
    if "model" in sheet.groups:
        validate_values(cfg, max(1, cfg.cluster.gpus))
    return cfg


def _composed(document: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment" / "translated.yaml"
        path.parent.mkdir()
        path.write_text(document, encoding="utf-8")
        return compose_run(["experiment=translated"], config_dir=folder)


def _lay_out(sheet: Sheet, file: str) -> None:
    """Split matrices over ranks where the model does not fit otherwise: other trainers shard its weights by ZeRO."""
    if "model" not in sheet.groups or any(sheet.settings[key].written for key in sheet.settings if key in _LAYOUT):
        return
    cfg = _composed(experiment(sheet, file))
    tensor = 1
    while tensor <= min(GPUS_PER_NODE, cfg.cluster.gpus) and cfg.cluster.gpus % tensor == 0:
        layout = replace(cfg.parallel, tensor=tensor, sequence=tensor > 1)
        try:
            fits = plan_of(replace(cfg, parallel=layout)).memory.fits
        except ConfigError:  # a size that does not divide
            return
        if fits:
            if tensor > 1:
                note = f"without it the job does not fit {cfg.cluster.gpus} x {DEVICE}, by `plan`"
                sheet.put("parallel.tensor", tensor, note=note)
                sheet.put("parallel.sequence", True, note="with parallel.tensor")
            return
        tensor *= 2
    sheet.without["a layout that fits"] = "see `aligner plan --sweep`"


def experiment(sheet: Sheet, file: str) -> str:
    """Return the text of the experiment's file: what the other file says, and defaults of its trainer that differ."""
    ours = compose([f"{group}={choice}" for group, choice in sheet.groups.items()])
    tree: dict[str, Any] = {}
    for key in [key for key, setting in sheet.settings.items() if not setting.written]:
        if _value(ours, key) == sheet.settings[key].value:
            del sheet.settings[key]
    for key, setting in sheet.settings.items():
        *above, leaf = key.split(".")
        section = tree
        for word in above:
            section = section.setdefault(word, {})
        section[leaf] = setting.value
    lines = ["# @package _global_", f"# {Path(file).name}, translated from {sheet.vocabulary.trainer}.", "defaults:"]
    lines += [f"  - override /{group}: {choice}" for group, choice in sheet.groups.items()]
    lines += [f"{section}: {_flow(tree[section])}" for section in hints(Config) if section in tree]
    return "\n".join([*lines, ""])


def _flow(values: Any) -> str:
    return yaml.safe_dump(values, default_flow_style=True, width=10**6, sort_keys=False).strip().removesuffix("\n...")


def _value(cfg: Config, key: str) -> Any:
    node: Any = cfg
    for word in key.split("."):
        node = node.get(word) if isinstance(node, dict) else getattr(node, word)
    return node


def report(sheet: Sheet, name: str, folder: str) -> str:
    """Return what became of each name, and the commands to run, as comments of YAML."""
    trainer = sheet.vocabulary.trainer.partition(" ")[0]
    settings = sheet.settings.items()
    blocks = {
        "Translated": sheet.chosen + [_line(key, setting) for key, setting in settings if setting.written],
        f"{trainer}'s defaults that differ from ours": [
            _line(k, s) for k, s in settings if not s.written and s.note + "".join(s.sources)
        ],
        "Without equivalent": [f"{what}: {why}" for what, why in sheet.without.items()],
        "Nothing to set": [f"{what}: {why}" if why else what for what, why in sheet.needless.items()],
    }
    gpus = sheet.settings["cluster.gpus"].value if "cluster.gpus" in sheet.settings else 1
    blocks["Commands"] = [*dict.fromkeys(sheet.downloads)] + [
        f"aligner {command} -c {folder} experiment={name}" for command in ("plan", f"launch --ranks {gpus}")
    ]
    lines = [
        line for title, block in blocks.items() if block for line in (f"#\n# {title}:", *(f"#   {b}" for b in block))
    ]
    return "\n".join([*lines, ""])


def _line(key: str, setting: Setting) -> str:
    note = f" ({setting.note})" if setting.note else ""
    sources = f"{', '.join(setting.sources)} -> " if setting.sources else ""
    return f"{sources}{key}={text(setting.value)}{note}"
