"""Recorded rollouts (rollout/record.py writes them) as the board shows them: groups of samples, numbers of each token.

Only the shown values of a file are read: small columns, and the rows of a page. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from aligner.board import safe_files
from aligner.board.query import Query, rounded
from aligner.board.runs import read_settings
from aligner.config.options import from_plain
from aligner.errors import AlignerError, DataError
from aligner.foreign import parse_json, record
from aligner.run.sample_table import plain

FOLDER = "rollouts"  # in the run folder
NAME = re.compile(r"step-(\d{8,18})\.safetensors", re.ASCII)
FORMAT, VERSION = "aligner-rollout", 1
GROUPS = 2  # of a page
PAGE_TOKENS = 16384  # of a page: further samples have theirs when they are asked for
SAMPLE_TOKENS = 4096  # at most so many of one sample in an answer
# number of each token -> the columns of a recording that it comes from
NUMBERS = {
    "advantage": ("trained/advantages",),
    "difference": ("trained/old_logprobs", "rollout_logprobs"),  # trainer - engine
    "kl": ("trained/old_logprobs", "trained/ref_logprobs"),  # k1: policy - reference
    "entropy": ("trained/entropy",),
    "value": ("trained/values",),
    "return": ("trained/returns",),
    "reward": ("trained/token_rewards",),
    "weight": ("trained/token_weights",),
    "logprob": ("rollout_logprobs",),
}


def steps(folder: Path) -> list[int]:
    """Return the steps of a run whose rollouts exist."""
    if not safe_files.within(folder, FOLDER):
        return []
    names = []
    with suppress(OSError):  # no folder, or one that is closed
        names = os.listdir(folder / FOLDER)
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


@dataclass(frozen=True)
class RecordedHeader:
    slots: list[int]
    prompts: list[dict[str, Any]]
    responses: list[str]


@dataclass(frozen=True)
class RecordedRollout:
    path: Path
    header: RecordedHeader
    small: dict[str, np.ndarray]  # columns of one number a sample
    decode: Callable[[Sequence[int]], list[str]]  # ids -> the text of each

    @classmethod
    def of(cls, folder: Path, step: int) -> RecordedRollout:
        """Open the rollout of a step in a run folder. Raises DataError for a file that is no recording, or damaged."""
        name = f"{FOLDER}/step-{step:08d}.safetensors"
        path = folder / name
        with _readable(path):
            safe_files.opened(folder, name).close()
            stat = path.stat()
            header, small = _small(path, stat.st_mtime_ns, stat.st_size)
            return cls(path, header, small, _decoder(folder))

    def page(self, query: Query) -> tuple[list[dict[str, Any]], bool]:
        """Return groups of samples, with tokens up to PAGE_TOKENS, and whether more groups follow. Raises DataError."""
        with _readable(self.path):
            return self._page(query)

    def _page(self, query: Query) -> tuple[list[dict[str, Any]], bool]:
        rewards, group = self.small["scores/total"], self.small["group"]
        prompts = dict(zip(self.header.slots, self.header.prompts, strict=True))
        rows = {slot: np.flatnonzero(group == slot).tolist() for slot in prompts}
        slots = [slot for slot, prompt in prompts.items() if query.takes(prompt.get("text", ""))]
        slots = [slot for slot in slots if any(query.within(rounded(float(rewards[row]))) for row in rows[slot])]
        if query.order != "newest":
            slots.sort(key=lambda slot: float(np.nansum(rewards[rows[slot]])), reverse=query.order == "best")
        first, left = query.page * GROUPS, PAGE_TOKENS
        groups = []
        for slot in slots[first : first + GROUPS]:
            prompt, samples = prompts[slot], []
            for row in rows[slot]:
                left -= min(int(self.small["lengths"][row]), SAMPLE_TOKENS)
                samples.append(self._sample(row) | {"tokens": self.tokens(row) if left >= 0 else None})
            groups.append(
                {"slot": slot, "id": prompt.get("id"), "prompt": str(prompt.get("text", "")), "samples": samples}
            )
        return groups, len(slots) > first + GROUPS

    def _sample(self, row: int) -> dict[str, Any]:
        components = {name: column for name, column in self.small.items() if name.startswith("scores/components/")}
        return {
            "row": row,
            "index": int(self.small["sample_index"][row]),
            "response": plain(self.header.responses[row]),
            "reward": rounded(float(self.small["scores/total"][row])),
            "finished": bool(self.small["finished"][row]),
            "valid": bool(self.small["valid"][row]),
            "rejected": bool(self.small["trained/rejected"][row]) if "trained/rejected" in self.small else False,
            "scores": {name.rpartition("/")[2]: rounded(float(column[row])) for name, column in components.items()},
        }

    def tokens(self, row: int) -> dict[str, Any]:
        """Return one sample's tokens, from the first one that the policy made: `texts`, `ids`, `made` (by the policy,
        not inserted), and by name the `numbers` that the recording has, null for inserted tokens. Raises DataError."""
        if not 0 <= row < len(self.header.responses):
            raise DataError(f"{self.path}: row {row}: expected one from 0 to {len(self.header.responses) - 1}")
        with _readable(self.path):
            return self._tokens(row)

    def _tokens(self, row: int) -> dict[str, Any]:
        with safe_open(str(self.path), "np") as file:
            whole = int(self.small["lengths"][row])
            columns = {
                name: file.get_slice(name)[row : row + 1][0, :whole]
                for name in {"tokens", "response_mask", *(column for sources in NUMBERS.values() for column in sources)}
                if name in file.keys()  # noqa: SIM118 (no mapping)
            }
        made = columns["response_mask"] > 0
        first = int(made.argmax()) if made.any() else whole
        seen = slice(first, first + SAMPLE_TOKENS)
        before = max(0, first - 1)
        ids = columns["tokens"][before : seen.stop].tolist()
        return {
            "texts": self.decode(ids)[first - before :],
            "ids": ids[first - before :],
            "made": made[seen].tolist(),
            "numbers": {
                name: _values([columns[column][seen] for column in sources], made[seen])
                for name, sources in NUMBERS.items()
                if columns.keys() >= set(sources)
            },
            "cut": whole > seen.stop,
        }


def _values(columns: Sequence[np.ndarray], made: np.ndarray) -> list[float | None]:
    """Return the first column, or its difference to the second."""
    shown = columns[0] - columns[1] if len(columns) > 1 else columns[0]
    return [rounded(float(value)) if safe_files else None for value, safe_files in zip(shown, made, strict=True)]


@functools.lru_cache(8)
def _small(path: Path, mtime_ns: int, size: int) -> tuple[RecordedHeader, dict[str, np.ndarray]]:
    """Read the header and the small columns. Time and size tell a file from one that has replaced it. Raises DataError,
    and as safetensors does."""
    where = f"{path}: header"
    with safe_open(str(path), "np") as file:
        text = (file.metadata() or {}).get("header", "{}")
        flat = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 1]  # noqa: SIM118
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        small = {name: file.get_tensor(name) for name in flat}
    fields = record(parse_json(text, where, DataError), where, DataError)
    if (fields.fields.get("format"), fields.fields.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path}: expected a recorded rollout (debug.record) of format {FORMAT} {VERSION}")
    fields.need("slots", "prompts", "responses")
    try:
        header = from_plain(
            RecordedHeader, {name: fields.fields[name] for name in ("slots", "prompts", "responses")}, "header"
        )
    except AlignerError as error:
        raise DataError(f"{path}: {error}") from None
    rows, one = len(header.responses), ("scores/total", "group", "lengths", "finished", "valid", "sample_index")
    wrong = [name for name in one if shapes.get(name) != [rows]]
    wrong += [name for name in small if shapes[name] != [rows] and name.startswith(("scores/", "trained/"))]
    wrong += [name for name in ("tokens", "response_mask") if shapes.get(name, [])[:1] != [rows]]
    if wrong or len(header.slots) != len(header.prompts):
        raise DataError(f"{path}: expected {wrong or ['slots']} of {rows} samples")
    return header, small


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error about the file's content into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: cannot be read as a recorded rollout ({text:.400})") from None


# --- tokens as text


def _decoder(folder: Path) -> Callable[[Sequence[int]], list[str]]:
    """Return the decoder of a run's tokenizer. If there is none, or none that can be read, the ids replace the
    texts."""
    roots = [folder / "hf", folder / "source"]
    with suppress(Exception):  # config.yaml may have any content
        settings = read_settings(folder)
        named, init = (Path(str(settings.get(key) or "-")).expanduser() for key in ("model.tokenizer", "model.init"))
        roots = [named, *roots, init, init / "hf"]
    file = next((path for root in roots if (path := root / "tokenizer.json").is_file()), None)
    tokenizer = _tokenizer(file, file.stat().st_mtime_ns) if file is not None else None
    if tokenizer is None:
        return lambda ids: [f"[{token}]" for token in ids]
    return functools.partial(_decoded, tokenizer)


@functools.lru_cache(4)
def _tokenizer(file: Path, mtime_ns: int) -> Any:
    """Read a tokenizer; None if the file is damaged."""
    from tokenizers import Tokenizer

    with suppress(Exception):  # it raises nothing narrower
        return Tokenizer.from_file(str(file))
    return None


def _decoded(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, decoded after the token before it, as some decoders drop the blank of a first
    one."""
    before = tokenizer.decode_batch([ids[max(0, i - 1) : i] for i in range(len(ids))], skip_special_tokens=False)
    both = tokenizer.decode_batch([ids[max(0, i - 1) : i + 1] for i in range(len(ids))], skip_special_tokens=False)
    return [text[len(first) :] for text, first in zip(both, before, strict=True)]
