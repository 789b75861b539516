"""`aligner recipes`: files of conf/experiment that name model, data and number of GPUs, with what `plan` says of
them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.files import conf_dir
from aligner.plan.command import predicted
from aligner.plan.devices import GIB
from aligner.plan.options import add_arguments
from aligner.plan.prediction import Prediction

DEVICE, GPUS_PER_NODE = "h100", 8
NODES = {DEVICE: GPUS_PER_NODE, "gb200": 4}  # device: GPUs per node
_GPUS = re.compile(r"_(gb200_)?\d+$")  # at the end of a recipe's name
_COMMENT = re.compile(r"(?:#.*\n)+")
REHEARSED, PUBLISHED_BY = "Rehearsed.", "Published: "


@dataclass(frozen=True)
class Recipe:
    name: str
    meaning: str
    published: str  # what others reached, with the address; empty: nothing known
    rehearsed: bool = False

    @property
    def status(self) -> str:
        return "planned and rehearsed" if self.rehearsed else "planned"

    @property
    def config(self) -> Config:
        return compose([f"experiment={self.name}"])

    @property
    def device(self) -> str:
        return next((name for name in NODES if f"_{name}_" in self.name), DEVICE)

    @property
    def arguments(self) -> list[str]:
        """Arguments of `plan` and `rehearse`."""
        machine = ["--device", self.device, "--gpus-per-node", str(NODES[self.device])]
        return machine * (self.device != DEVICE) + [f"experiment={self.name}"]


def plan_of(cfg: Config, device: str = DEVICE) -> Prediction:
    """Return what `plan` predicts for the config's number of these GPUs."""
    parser, machine = argparse.ArgumentParser(), ["--device", device, "--gpus-per-node", str(NODES[device])]
    add_arguments(parser)
    return predicted(parser.parse_args(["--gpus", str(cfg.cluster.gpus), *machine]), cfg)


def recipes() -> dict[str, Recipe]:
    """Return the recipes by name."""
    paths = sorted((conf_dir() / "experiment").glob("*.yaml"))
    return {path.stem: _read(path) for path in paths if _GPUS.search(path.stem)}


def _read(path: Path) -> Recipe:
    match = _COMMENT.match(path.read_text(encoding="utf-8"))
    lines = [line[1:].strip() for line in match[0].splitlines()[1:]] if match else []
    published = [line.removeprefix(PUBLISHED_BY) for line in lines if line.startswith(PUBLISHED_BY)]
    meaning = " ".join(line for line in lines if line != REHEARSED and not line.startswith(PUBLISHED_BY))
    return Recipe(path.stem, meaning, "".join(published), REHEARSED in lines)


def data_name(cfg: Config) -> str:
    """Return the dataset's name for `aligner data`."""
    return Path(cfg.data.train).parent.name


def main(args: argparse.Namespace) -> int:
    """Run `aligner recipes`. Raises ConfigError for an unknown name."""
    known = recipes()
    if not args.names:
        print(f"{'recipe':<41}{'stage':<9}{'GPUs':>10}{'step s':>9}{'GiB':>7}  {'data':<15}status")
        for recipe in known.values():
            print(_line(recipe), flush=True)
        print("Step and memory by `plan`. None has run on a GPU.")
        return 0
    for name in args.names:
        if name not in known:
            raise ConfigError("NAME", name, "one of " + ", ".join(known))
        print(_described(known[name]))
    return 0


def _line(recipe: Recipe) -> str:
    cfg = recipe.config
    prediction = plan_of(cfg, recipe.device)
    gib = prediction.memory.peak_bytes / GIB
    sizes = f"{cfg.cluster.gpus:>4} {recipe.device:<5}{prediction.step_s:>9.1f}{gib:>7.1f}"
    return f"{recipe.name:<41}{cfg.stage.name:<9}{sizes}  {data_name(cfg):<15}{recipe.status}"


def _described(recipe: Recipe) -> str:
    from aligner.tools.published_rows import PUBLISHED

    cfg = recipe.config
    data, out = data_name(cfg), ["# " + recipe.meaning]
    folders = [cfg.model.init, cfg.reward.model, cfg.algorithm.distill.teacher]
    out += [f"# published: {recipe.published}"] * bool(recipe.published) + [f"# {recipe.status}; not run on a GPU"]
    out += [
        f"hf download {folder.removeprefix('models/')} --local-dir {folder}"
        for folder in folders
        if folder.startswith("models/")
    ]
    repository = PUBLISHED[data].repository
    out += [f"hf download --repo-type dataset {repository} --local-dir downloads/{data}"]
    out += [f"aligner data {data} downloads/{data}"]
    out += [" ".join(["aligner", command, *recipe.arguments]) for command in ("plan", "rehearse")]
    out += [f"aligner submit experiment={recipe.name}"]
    return "\n".join([*out, ""])
