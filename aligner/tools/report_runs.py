"""What the report reads: run folders, and what there is to say of a run beside its curves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import ConfigError
from aligner.run.metrics import read_jsonl
from aligner.run.starts import FILE as STARTS
from aligner.tools import svg

HEADLINE = (
    "eval/accuracy",
    "eval/loss",
    "reward/mean",
    "sft/loss",
    "rm/loss",
    "rm/accuracy",
    "kl/ref_k3",
    "policy/entropy",
)


def number(value: Any) -> float | None:
    """The value as a curve can show it, None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@dataclass
class Run:
    """What a run folder holds, as far as the report goes."""

    name: str
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""

    def curve(self, name: str) -> list[tuple[float, float | None]]:
        return [(record["step"], number(record[name])) for record in self.metrics if name in record]

    def last(self, name: str) -> float | None:
        return next((v for record in reversed(self.metrics) if (v := number(record.get(name))) is not None), None)

    @property
    def settings(self) -> dict[str, Any]:
        """The config by dotted key; empty where there is none to read."""
        try:
            return dict(flat(yaml.safe_load(self.config) or {}))
        except yaml.YAMLError:
            return {}

    @property
    def result(self) -> str:
        """How its last start ended."""
        if not self.starts:
            return ""
        return str(self.starts[-1].get("result", "no end recorded: running, or killed"))

    def facts(self) -> dict[str, Any]:
        """What stands at the top of the page, by a short name."""
        settings = self.settings
        first = next((record for record in self.starts if "started" in record), {})
        latest = next((record for record in reversed(self.starts) if "started" in record), {})
        versions, hardware = (value if isinstance(value, dict) else {} for value in _two(latest))
        commit = str(latest.get("commit") or "")[:12] + (" with changes" if latest.get("dirty") else "")
        return {
            "stage": settings.get("stage.name"),
            "model": " ".join(filter(None, [settings.get("model.family"), _count(number(latest.get("parameters")))])),
            "seed": settings.get("seed"),
            "seconds": self.seconds(),
            "started": first.get("started"),
            "starts": sum("started" in record for record in self.starts) or None,
            "ranks": latest.get("ranks"),
            "host": latest.get("host"),
            "hardware": hardware.get("gpu") or hardware.get("cpu"),
            "commit": commit or None,
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "command": latest.get("command"),
        }

    def seconds(self) -> float | None:
        """From each start to its end, or to its last record of metrics where no end was recorded; None: not known."""
        total, known = 0.0, False
        walls = [wall for record in self.metrics if (wall := number(record.get("wall_time"))) is not None]
        begins = [i for i, record in enumerate(self.starts) if "started" in record]
        for at, upto in zip(begins, [*begins[1:], len(self.starts)], strict=False):
            begun = _epoch(self.starts[at]["started"])
            following = _epoch(self.starts[upto]["started"]) if upto < len(self.starts) else math.inf
            ends = [_epoch(record["ended"]) for record in self.starts[at:upto] if "ended" in record]
            ends = ends or [max((wall for wall in walls if begun <= wall < following), default=begun)]
            total, known = total + ends[0] - begun, True
        if known:
            return number(total)
        return walls[-1] - walls[0] if len(walls) > 1 else None


def _two(start: dict[str, Any]) -> tuple[Any, Any]:
    return start.get("versions"), start.get("hardware")


def _count(value: float | None) -> str:
    return "" if value is None else svg.number(value)


def _epoch(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return math.nan


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.3g} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def read_run(folder: Path, name: str = "") -> Run:
    """Whatever the folder has of a run."""
    config = folder / "config.yaml"
    steps = [record for record in read_jsonl(folder / "metrics.jsonl") if number(record.get("step")) is not None]
    return Run(
        name=name or folder.resolve().name,
        metrics=steps,
        samples=[row for row in read_jsonl(folder / "samples.jsonl") if number(row.get("step")) is not None],
        alarms=read_jsonl(folder / "alarms.jsonl"),
        starts=read_jsonl(folder / STARTS),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def run_folders(given: Sequence[Path]) -> list[Path]:
    """The run folders among those given, and within those that are folders of runs (a sweep); a run that ended before
    its first step counts. Raises ConfigError if there is no run at all."""
    found = []
    for folder in given:
        if is_run(folder):
            found.append(folder)
        elif folder.is_dir():
            children = sorted((child for child in folder.iterdir() if child.is_dir()), key=_natural)
            runs = [child for child in children if is_run(child) or (child / "config.yaml").is_file()]
            found += runs or ([folder] if (folder / "config.yaml").is_file() else [])
    if not any(map(is_run, found)):
        expected = "a run folder (run.dir) that contains metrics.jsonl, or a folder of such"
        raise ConfigError("report", " ".join(map(str, given)), expected)
    return list(dict.fromkeys(found))


def _natural(path: Path) -> list[tuple[int, str]]:
    """10_x after 9_x."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def final_metric(folder: Path) -> tuple[str, float] | None:
    """The number that says most of how a run went, and its last value."""
    run = read_run(folder)
    return next(((name, value) for name in HEADLINE if (value := run.last(name)) is not None), None)
