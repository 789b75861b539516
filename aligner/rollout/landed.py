"""What engines made of a rollout, in a file: their columns, and as JSON what these do not tell of each sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from aligner.errors import DataError
from aligner.models.safetensors_io import save_whole
from aligner.rollout.groups import Groups
from aligner.rollout.requests import Request
from aligner.types import STOP, Generations, Sample, Stop, Trajectory

TOLD = "samples"  # uint8: the JSON
OPENED = ("tokens", "text", "messages")  # of a prompt, what an environment's reset may change


def write_landed(groups: Groups, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    told = json.dumps([_told(sample) for sample in groups.samples]).encode()
    columns = groups.generations.tensors() | {TOLD: torch.frombuffer(bytearray(told), dtype=torch.uint8)}
    save_whole(path, columns, {})


def read_landed(version: int, requests: Mapping[int, Request], path: Path, held: range, wanted: range) -> Groups:
    """The slots `wanted`, whose `requests` these are, of a file of those `held`. Raises DataError."""
    with safe_open(path, "pt") as file:
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if TOLD not in columns:
        raise DataError(f"{path}: written by an older version of this program")
    told = json.loads(columns.pop(TOLD).numpy().tobytes())
    group = len(told) // len(held)
    first = (wanted.start - held.start) * group
    rows = range(first, first + len(wanted) * group)
    found = Generations(weight_version=version, **{name: t[rows.start : rows.stop] for name, t in columns.items()})
    lengths, finished = found.lengths.tolist(), (found.finish_reason == STOP).tolist()
    samples = []
    for i, row in enumerate(rows):
        request, tokens = requests[wanted[i // group]], tuple(found.tokens[i, : lengths[i]].tolist())
        prompt, index = dataclasses.replace(request.prompt, **opening(told[row])), i % group
        trajectory, response = _trajectory(told[row]["trajectory"]), told[row]["response"]
        rest = finished[i], version, trajectory, request.seeds[index]
        samples.append(Sample(prompt, index, response, tokens, *rest))
    return Groups(list(wanted), found, samples)


def _told(sample: Sample) -> dict[str, Any]:
    found: dict[str, Any] = {"response": sample.response, "trajectory": None}
    if sample.trajectory is not None:
        found["trajectory"] = dataclasses.asdict(sample.trajectory)
        found |= {name: getattr(sample.prompt, name) for name in OPENED}
    return found


def opening(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt is to be given of that."""
    found = {name: told[name] for name in OPENED if name in told}
    return found | {name: tuple(found[name]) for name in ("tokens", "messages") if name in found}


def _trajectory(told: dict[str, Any] | None) -> Trajectory | None:
    if told is None:
        return None
    more = {"messages": tuple(told["messages"]), "stop": Stop(told["stop"])}
    return Trajectory(**told | more | {"turn_rewards": tuple(told["turn_rewards"])})
