"""What the report reads: run folders, and what there is to say of a run beside its curves."""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import ConfigError
from aligner.run.metrics import each_jsonl, read_jsonl
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        shown = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return shown if math.isfinite(shown) else None


class Column:
    """A metric: the numbers of the records that have it, and its values there; NaN for what is no finite number."""

    def __init__(self) -> None:
        self.records, self.values = array("I"), array("d")


class Metrics:
    """Records of a run in columns: those of a long one are millions of values, of 12 bytes each."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        """Records without a step are left out."""
        self.steps: list[float] = []
        self.columns: defaultdict[str, Column] = defaultdict(Column)
        for record in records:
            if number(record.get("step")) is None:
                continue
            for name, value in record.items():
                column, shown = self.columns[name], number(value)
                column.records.append(len(self.steps))
                column.values.append(math.nan if shown is None else shown)
            self.steps.append(record["step"])

    def names(self) -> set[str]:
        return self.columns.keys() - {"step", "wall_time"}

    def curve(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value or None), as many as a chart shows."""
        column = self.columns.get(name, Column())
        points = [(self.steps[column.records[i]], column.values[i]) for i in svg.thin(range(len(column.values)))]
        return [(step, None if math.isnan(value) else value) for step, value in points]

    def finite(self, name: str) -> Iterator[float]:
        """What is a number, from the last to the first."""
        return (value for value in reversed(self.columns.get(name, Column()).values) if not math.isnan(value))

    def seconds(self, name: str) -> list[float]:
        """For every record, 0 where it has none."""
        found, column = [0.0] * len(self.steps), self.columns.get(name, Column())
        for record, value in zip(column.records, column.values, strict=True):
            found[record] = value if value > 0 else 0.0
        return found


@dataclass
class Run:
    """What a run folder holds, as far as the report goes."""

    name: str
    metrics: Metrics
    samples: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""

    def last(self, name: str) -> float | None:
        return next(self.metrics.finite(name), None)

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
        walls = [*self.metrics.finite("wall_time")][::-1]
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
    return Run(
        name=name or folder.resolve().name,
        metrics=Metrics(each_jsonl(folder / "metrics.jsonl")),
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
