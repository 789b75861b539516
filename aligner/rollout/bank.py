"""The samples that are in flight by the token clock (`rollout/clock.py`), and the file that they are in: of each its
turns, which are one for a single answer, and as JSON what these do not tell."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from aligner.data.dialogue import Given
from aligner.data.tool_calls import Call
from aligner.errors import DataError
from aligner.models.safetensors_io import save_whole
from aligner.ops.packing.turns import Turn, common
from aligner.rollout.landed import OPENED, TOLD, opening
from aligner.rollout.parts import Parts
from aligner.rollout.play import Play
from aligner.types import Stop

COLUMNS = {"given": "i", "output": "i", "logprobs": "f", "full": "f", "versions": "i"}  # of all turns, end to end
DTYPES = {"i": torch.int32, "f": torch.float32}
STATE = ("messages", "told", "failure", "rewards", "score", "seconds", "retried", "wrong", "waits")  # of trajectories


@dataclass(frozen=True)
class Whole(Parts):
    """Of one part each, which global rank 0 writes and all ranks read."""

    @property
    def mine(self) -> range:
        return range(1)

    @property
    def part(self) -> tuple[int, int]:
        return 0, 1


@dataclass
class Bank:
    """Samples in flight, `group` of them to each of the groups `numbers`, which ascend."""

    group: int
    numbers: list[int]
    plays: list[Play]

    def ready(self) -> list[int]:
        """Places of the groups that are whole, in the order in which they are trained on."""
        last = {}
        for place in range(len(self.numbers)):
            ends = [play.ended for play in self._of(place)]
            if all(ends):
                last[place] = max(ends)
        return sorted(last, key=lambda place: (last[place], place))

    def open(self) -> list[Play]:
        """Those that have not ended; of each group first those that pause in an answer."""
        found = []
        for place in range(len(self.numbers)):
            found += sorted((play for play in self._of(place) if not play.ended), key=lambda play: not play.said)
        return found

    def take(self, places: Sequence[int]) -> Bank:
        return Bank(self.group, [self.numbers[p] for p in places], [play for p in places for play in self._of(p)])

    def add(self, other: Bank) -> Bank:
        return Bank(self.group, self.numbers + other.numbers, self.plays + other.plays)

    def update(self, found: Sequence[Play], window: int) -> None:
        """By what these have become in a window."""
        by_key = {(play.place, play.index): play for play in found}
        self.plays = [by_key.get((play.place, play.index), play) for play in self.plays]
        for play in found:
            play.ended = 0 if play.open else window

    def _of(self, place: int) -> list[Play]:
        return self.plays[place * self.group : (place + 1) * self.group]


def write_bank(bank: Bank, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: array(kind) for name, kind in COLUMNS.items()}
    told = json.dumps([_told(play, columns) for play in bank.plays]).encode()
    found = {name: _tensor(bytes(column), DTYPES[COLUMNS[name]]) for name, column in columns.items()}
    save_whole(path, found | {TOLD: _tensor(told, torch.uint8)}, {})


def read_bank(bank: Bank, path: Path, held: range, wanted: range) -> Bank:
    """What was written of the same groups, of which `bank` has the requests. Raises DataError."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    if found.keys() != {*COLUMNS, TOLD}:
        raise DataError(f"{path}: written by an older version of this program")
    told, columns = json.loads(found.pop(TOLD)), {name: array(kind) for name, kind in COLUMNS.items()}
    for name, column in columns.items():
        column.frombytes(found[name])
    at = dict.fromkeys(columns, 0)

    def more(name: str, count: int) -> array:
        at[name] += count
        return columns[name][at[name] - count : at[name]]

    return replace(bank, plays=[_play(play, one, more) for play, one in zip(bank.plays, told, strict=True)])


def _told(play: Play, columns: dict[str, array]) -> dict[str, Any]:
    """`columns` get its tokens: of what was given for a turn that which is not at the beginning of the turn before."""
    turns, before, sizes = play.turns, play.prompt.tokens, []
    if play.open:
        turns = [*turns, play.begun or Turn(play.given.tokens, (), ())]
    for turn in turns:
        kept = common(before, turn.prompt)
        sizes.append([kept, len(turn.prompt) - kept, len(turn.output), turn.full is not None])
        columns["given"].extend(turn.prompt[kept:])
        for name in ("output", "logprobs", "full", "versions"):
            columns[name].extend(getattr(turn, name) or ())
        before = (*turn.prompt, *turn.output)
    found = {"turns": sizes, "ended": play.ended, "stop": play.stop}
    if play.session is None:
        return found
    found |= {name: getattr(play, name) for name in STATE}
    found |= {"prompt": {name: getattr(play.prompt, name) for name in OPENED}, "given": play.given.text}
    return found | {"calls": [asdict(call) for call in play.calls], "asked": play.session.asked}


def _play(play: Play, told: dict[str, Any], more: Any) -> Play:
    prompt, turns = replace(play.prompt, **opening(told.get("prompt", {}))), []
    before = prompt.tokens
    for kept, given, made, full in told["turns"]:
        columns = more("output", made), more("logprobs", made), more("full", made) if full else None
        turns.append(Turn((*before[:kept], *more("given", given)), *columns, more("versions", made)))
        before = (*turns[-1].prompt, *turns[-1].output)
    stop, given, begun = Stop(told["stop"]) if told["stop"] else None, play.given, None
    if stop is None:
        last = turns.pop()
        given, begun = Given(told.get("given", given.text), tuple(last.prompt)), last if last.output else None
    found = replace(play, prompt=prompt, turns=turns, given=given, begun=begun, stop=stop, ended=told["ended"])
    if play.session is None:
        return found
    calls, session = [Call(**call) for call in told["calls"]], replace(play.session, asked=told["asked"])
    return replace(found, calls=calls, session=session, **{name: told[name] for name in STATE})


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
