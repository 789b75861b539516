"""Samples that are generated and not trained on yet, in memory and in the run folder: no start generates any twice.

<run.dir>/pending_rollouts/step-00000013/
    part-00000-of-00002.safetensors   a data-parallel rank's share: the turns of each sample, the rest as JSON
    part-00000-of-00002.json          written last, behind its own checksum: that of the share, its groups, the version

A number is one of the schedule's orders to the engines (`rollout/schedule.py`). Storing takes no message between
ranks; stored samples may be read on any number of data-parallel ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from aligner.data.dialogue import EnginePrompt
from aligner.data.tool_calls import Call
from aligner.errors import DataError
from aligner.files import file_hash, fsync_file, fsync_folder, write_whole
from aligner.megatron.groups import Layout
from aligner.models.safetensors_io import save_whole
from aligner.ops.agree import by_rank_0
from aligner.ops.packing.turns import Turn, common
from aligner.ops.reduce import first_cause
from aligner.rollout.sample_state import DTYPES, SampleState
from aligner.types import Stop

FOLDER = "pending_rollouts"  # in the run folder
NAME = re.compile(r"step-(\d{8,18})", re.ASCII)
PART = re.compile(r"part-(\d{5})-of-(\d{5})\.json")
Manifest = list[dict[str, Any]]  # the descriptions of the shares, by data-parallel rank
COLUMNS = {"given": "i", "output": "i", "logprobs": "f", "full": "f", "versions": "i"}  # of all turns, end to end
OTHERS = "other groups"  # why stored samples are not read, without a report
JSON, ROUTING = "samples", "routing"  # tensors beside the columns: uint8, and that of all turns, end to end
OPENED = ("tokens", "text", "messages")  # of a prompt; an environment's reset may change these
SESSION = ("asked", "answered", "key", "tried", "apart")


@dataclass
class InFlight:
    """Ordered samples, `size` of them to each of the groups `numbers`, which ascend."""

    size: int
    numbers: list[int]
    states: list[SampleState]

    def ready(self) -> list[int]:
        """Return the indices of the whole groups, in the order in which they are trained on."""
        last = {}
        for index in range(len(self.numbers)):
            ends = [state.ended for state in self._of(index)]
            if all(ends):
                last[index] = max(ends)
        return sorted(last, key=lambda index: (last[index], index))

    def open(self) -> list[SampleState]:
        """Return the samples that have not ended; of each group first those that are paused in a response."""
        states = []
        for index in range(len(self.numbers)):
            states += sorted((p for p in self._of(index) if not p.ended), key=lambda state: not state.paused_tokens)
        return states

    def take(self, indices: Sequence[int]) -> InFlight:
        numbers = [self.numbers[index] for index in indices]
        return InFlight(self.size, numbers, [state for index in indices for state in self._of(index)])

    def add(self, other: InFlight) -> InFlight:
        return InFlight(self.size, self.numbers + other.numbers, self.states + other.states)

    def update(self, states: Iterable[SampleState], order: int) -> None:
        """Replace samples by their states after the order of this number."""
        by_key = {(state.group, state.index): state for state in states}
        self.states = [by_key.get((state.group, state.index), state) for state in self.states]
        for state in by_key.values():
            state.ended = 0 if state.open else order

    def _of(self, index: int) -> list[SampleState]:
        return self.states[index * self.size : (index + 1) * self.size]


@dataclass(frozen=True)
class Store:
    """The store of samples. `shared`: all data-parallel ranks have the same samples, and global rank 0 writes them.
    Else each rank's samples are written by the first of its peers."""

    folder: Path
    key: str  # hash of everything that the rollouts of this run depend on, but for the layout
    layout: Layout
    shared: bool = False
    other_key: str = ""  # the same, of the config without the model's true shape

    def of(self, number: int) -> Path:
        return self.folder / f"step-{number:08d}"

    def numbers(self) -> list[int]:
        return sorted(int(match[1]) for path in self.folder.glob("step-*") if (match := NAME.fullmatch(path.name)))

    def others(self) -> list[str]:
        """Return the names of other files in the folder."""
        return sorted(path.name for path in self.folder.glob("*") if not NAME.fullmatch(path.name))

    def write(self, number: int, version: int, flight: InFlight) -> None:
        """Write this rank's share, if it has one to write. Raises OSError."""
        if dist.get_rank() != 0 if self.shared else self.layout.peers.rank() != 0:
            return
        share, parts = (0, 1) if self.shared else (self.layout.dp_rank, self.layout.data)
        path = self.of(number) / f"part-{share:05d}-of-{parts:05d}.safetensors"
        write_samples(path, flight)
        fsync_file(path)
        description = {"key": self.key, "weight_version": version, "file": path.name, "sha256": file_hash(path)}
        text = json.dumps(description | {"groups": flight.numbers})
        write_whole(path.with_suffix(".json"), f"{_sha256(text)}\n{text}")
        fsync_folder(path.parent)

    def read(self, number: int, version: int, fresh: InFlight) -> InFlight | None:
        """Return `fresh`, whose samples have not begun, as this run stored them with these weights. None on every
        rank if one of them is missing or damaged; damage is reported. Collective."""
        manifest: Manifest | None = by_rank_0(lambda: self._manifest(number, version))
        if manifest is None:
            return None
        states: dict[int, list[SampleState]] = {}
        cause = ""
        try:
            for description in manifest:
                held = set(description["groups"])
                if wanted := [index for index, group in enumerate(fresh.numbers) if group in held]:
                    path = self.of(number) / description["file"]
                    if file_hash(path) != description["sha256"]:
                        raise DataError(f"{path}: damaged: its checksum is not the one of its description")
                    states |= read_samples(path, description["groups"], fresh.take(wanted))
        except (DataError, OSError) as error:
            cause = str(error)
        if not cause and states.keys() != set(fresh.numbers):
            cause = OTHERS
        first = first_cause(cause)
        if first is None:
            return replace(fresh, states=[state for group in fresh.numbers for state in states[group]])
        if dist.get_rank() == 0:
            if first[1] != OTHERS:
                _report(number, f"on rank {first[0]}: {first[1]}")
            self.delete(number)
        return None

    def _manifest(self, number: int, version: int) -> Manifest | None:
        """Return the descriptions of a whole order of this run and these weights. Anything else is deleted before
        new files are written; damage is reported."""
        try:
            manifest = _read_manifest(self.of(number))
        except DataError as error:
            _report(number, str(error))
            manifest = None
        ours = manifest is not None and all("groups" in description for description in manifest)
        if ours and manifest[0]["key"] in (self.key, self.other_key) and manifest[0]["weight_version"] == version:
            return manifest
        self.delete(number)
        return None

    def delete(self, number: int) -> None:
        shutil.rmtree(self.of(number), ignore_errors=True)

    def delete_after(self, number: int) -> None:
        if dist.get_rank() == 0:
            for later in self.numbers():
                if later > number:
                    self.delete(later)

    def drop(self, number: int, needed: Collection[int] = ()) -> None:
        """Delete orders up to this number, whose checkpoint is complete, except for those `needed`."""
        if dist.get_rank() == 0:
            for earlier in self.numbers():
                if earlier <= number and earlier not in needed:
                    self.delete(earlier)

    def clear(self) -> None:
        """Delete all stored samples, for a start that does not continue them."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _report(number: int, why: str) -> None:
    print(f"WARNING: {why}\nWARNING: order {number} is generated again", flush=True)


def read_description(path: Path) -> dict[str, Any]:
    """Read a description. Raises DataError if it is damaged."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if digest != _sha256(text):
        raise DataError(f"{path}: damaged: it does not have its checksum")
    return json.loads(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_manifest(folder: Path) -> Manifest | None:
    """Return the descriptions of all shares, None where one is missing: the run was killed while writing. Raises
    DataError where one is damaged, or of another run or other weights than the first."""
    parts: dict[int, dict[str, Any]] = {}
    expected = 0
    for path in folder.glob("part-*.json"):
        match = PART.fullmatch(path.name)
        if match is not None:
            expected = int(match[2])
            parts[int(match[1])] = read_description(path)
    if not expected or sorted(parts) != list(range(expected)):
        return None
    manifest = [parts[i] for i in range(expected)]
    first = manifest[0]
    if any((one["key"], one["weight_version"]) != (first["key"], first["weight_version"]) for one in manifest):
        raise DataError(f"{folder}: its parts are of different runs or weights")
    return manifest


# --- the file of a share


def write_samples(path: Path, flight: InFlight) -> None:
    """Write the samples. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns, routing = {name: array(kind) for name, kind in COLUMNS.items()}, list[Tensor]()
    rest = json.dumps([_rest(state, columns, routing) for state in flight.states]).encode()
    tensors = {name: _tensor(column, DTYPES[COLUMNS[name]]) for name, column in columns.items()}
    tensors |= {ROUTING: torch.cat(routing)} if routing else {}
    save_whole(path, tensors | {JSON: _tensor(bytearray(rest), torch.uint8)}, {})


def read_samples(path: Path, groups: Sequence[int], wanted: InFlight) -> dict[int, list[SampleState]]:
    """Return group -> its samples, from a file of `groups`; `wanted` has them as they began. Raises DataError."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not tensors.keys() >= {*COLUMNS, JSON}:
        raise DataError(f"{path}: written by an older version of this program")
    reader = _Reader(tensors)
    rest = json.loads(tensors[JSON].numpy().tobytes())
    began = dict(zip(wanted.numbers, range(len(wanted.numbers)), strict=True))
    states: dict[int, list[SampleState]] = {}
    for index, group in enumerate(groups):
        for i in range(wanted.size):
            one = rest[index * wanted.size + i]
            if group in began:
                states.setdefault(group, []).append(
                    _read_sample(wanted.states[began[group] * wanted.size + i], one, reader)
                )
            else:
                reader.skip(one)
    return states


class _Reader:
    """A reader of a file's columns, from their beginnings on."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.columns = {name: array(kind) for name, kind in COLUMNS.items()}
        for name, column in self.columns.items():
            column.frombytes(memoryview(tensors[name].numpy()).cast("B"))
        self.routing = tensors.get(ROUTING)
        self.at = dict.fromkeys((*COLUMNS, ROUTING), 0)

    def next(self, name: str, count: int) -> array:
        self.at[name] += count
        return self.columns[name][self.at[name] - count : self.at[name]]

    def next_routing(self, count: int) -> Tensor | None:
        self.at[ROUTING] += count
        return None if self.routing is None else self.routing[self.at[ROUTING] - count : self.at[ROUTING]]

    def skip(self, rest: dict[str, Any]) -> None:
        for number, (_, prompt, output, full) in enumerate(rest["turns"]):
            counts = {"given": prompt, "output": output, "logprobs": output, "versions": output, "full": full * output}
            counts[ROUTING] = rest["routed"][number] if "routed" in rest else 0
            for name, count in counts.items():
                self.at[name] += count


def _rest(state: SampleState, columns: dict[str, array], routing: list[Tensor]) -> dict[str, Any]:
    """Return a sample's state as JSON, and append its tokens to `columns`: of each turn's prompt only the suffix
    after the prefix shared with the turn before."""
    turns, before, sizes = state.turns, state.prompt.tokens, []
    if state.open:
        turns = [*turns, state.begun or Turn(state.next_prompt.tokens, (), ())]
    for turn in turns:
        kept = common(before, turn.prompt)
        sizes.append([kept, len(turn.prompt) - kept, len(turn.output), turn.full is not None])
        columns["given"].extend(turn.prompt[kept:])
        for name in ("output", "logprobs", "full", "versions"):
            columns[name].extend(getattr(turn, name) or ())
        before = (*turn.prompt, *turn.output)
    rest = {"turns": sizes, "ended": state.ended, "stop": state.stop}
    routed = [turn.routing for turn in turns if turn.routing is not None]
    if routed:
        routing += routed
        rest["routed"] = [0 if turn.routing is None else len(turn.routing) for turn in turns]
    if state.session is None:
        return rest
    rest |= {name: getattr(state, name) for name in state.STORED}
    rest |= {"prompt": {name: getattr(state.prompt, name) for name in OPENED}, "given": state.next_prompt.text}
    rest |= {name: getattr(state.session, name) for name in SESSION}
    return rest | {"calls": [asdict(call) for call in state.calls]}


def _read_sample(state: SampleState, rest: dict[str, Any], reader: _Reader) -> SampleState:
    opened = rest.get("prompt", {})
    opened |= {name: tuple(opened[name]) for name in ("tokens", "messages") if opened.get(name) is not None}
    prompt, turns = replace(state.prompt, **opened), list[Turn]()
    before = prompt.tokens
    for number, (kept, prompt_count, output, full) in enumerate(rest["turns"]):
        read = (*before[:kept], *reader.next("given", prompt_count))
        output_tokens, logprobs = reader.next("output", output), reader.next("logprobs", output)
        whole, versions = reader.next("full", output) if full else None, reader.next("versions", output)
        routing = reader.next_routing(rest["routed"][number]) if "routed" in rest else None
        turns.append(Turn(read, output_tokens, logprobs, whole, versions, routing))
        before = (*read, *output_tokens)
    stop, upcoming, begun = Stop(rest["stop"]) if rest["stop"] else None, state.next_prompt, None
    if stop is None:
        last = turns.pop()
        upcoming = EnginePrompt(rest.get("given", state.next_prompt.text), tuple(last.prompt))
        begun = last if last.output else None
    began = replace(
        state, prompt=prompt, turns=turns, next_prompt=upcoming, begun=begun, stop=stop, ended=rest["ended"]
    )
    if state.session is None:
        return began
    calls, prompt_of_row = [Call(**call) for call in rest["calls"]], None if prompt == state.prompt else state.prompt
    # without the environment of what began here, which another pool may hold
    questions = {name: rest[name] for name in SESSION if name in rest}
    session = replace(state.session, **questions, worker=None, process=None, name="")
    stored = {name: rest[name] for name in state.STORED if name in rest}
    return replace(began, calls=calls, session=session, row_prompt=prompt_of_row, **stored)


def _tensor(data: array | bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
