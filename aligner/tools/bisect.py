"""`aligner bisect A B`: the first step at which two runs part, what parts there first, and what they were computed by.

The hashes of steps.jsonl tell step, part and tensor; recordings of both (`debug.record`, `aligner replay`) also the
sample and the token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aligner.config.identity import changes
from aligner.config.key import REFUSE
from aligner.errors import DataError
from aligner.rollout.record import FOLDER as ROLLOUTS
from aligner.rollout.record import TRAINED, read_header
from aligner.run.chain import PARTS, Record, by_tensor, read_chain
from aligner.run.rows import FOLDER as ROWS
from aligner.run.rows import file_name

LAYOUT = ("parallel.", "engine.tensor_parallel", "engine.ranks", "batch.", "optim.distributed")
UNSEEN = ("logging.", "checkpoint.", "eval.", "run.")  # keys of which no step depends, but for these
SEEN = ("run.steps", "run.deterministic")
LABELS = ("labels", "told_by")  # of rows
CAME = ("tokens", "rollout_logprobs")  # token by token
# then, in the order in which a step finds it, after the components of the rewards
FOUND = (
    "rewards",
    "valid",
    *(f"{TRAINED}{name}" for name in ("old_logprobs", "ref_logprobs", "values", "token_weights")),
)
FOUND += tuple(f"{TRAINED}{name}" for name in ("token_rewards", "returns", "advantages"))
BEFORE = "the weights that it begins with"


class Step(NamedTuple):
    """Of a step its record, the one before it, with the weights that it begins with, and what computes it."""

    found: Record
    before: Record
    start: Record


def main(args: argparse.Namespace) -> int:
    """0: no step that both have differs; 1: one does."""
    runs = Path(args.run), Path(args.other)
    lines = list(bisect(*runs))
    print("\n".join(lines), flush=True)
    return int(lines[0].startswith("part"))


def bisect(a: Path, b: Path) -> Iterator[str]:
    """What to tell, line by line; the first begins with `part` where they do. Raises DataError."""
    there, here = steps_of(a), steps_of(b)
    both = sorted(there.keys() & here.keys())
    if not both:
        raise DataError(f"{a} and {b}: expected runs that have a step in common")
    for step in both:
        where = _part(there[step], here[step])
        if where:
            yield f"part at step {step} of {both[0]} to {both[-1]}: {where}"
            for line in made_by(there[step].start, here[step].start):
                yield f"computed by other: {line}"
            yield from _details(a, b, step, where)
            return
    yield f"the same: steps {both[0]} to {both[-1]}"


def steps_of(run: Path) -> dict[int, Step]:
    """Raises DataError."""
    steps: dict[int, Step] = {}
    before, start = {}, {}
    for found in read_chain(run):
        if "start" in found:
            start = found["start"]
        else:
            steps[found["step"]] = Step(found, before, start)
        before = found
    return steps


def _part(a: Step, b: Step) -> str:
    """What of a step is not the same in both, the first of it; "" for nothing."""
    there, here = a.found, b.found
    if wrong := tensors_apart(a._replace(found=a.before), b._replace(found=b.before)):
        return f"{BEFORE}, first of {len(wrong)} tensors {wrong[0]}"
    for part in PARTS:
        if there["batch"].get(part) != here["batch"].get(part):
            return part
    for name in {**there["numbers"], **here["numbers"]}:
        old, new = there["numbers"].get(name), here["numbers"].get(name)
        if old != new:
            return f"{name} {old!r} | {new!r}"
    wrong = tensors_apart(a, b)
    return f"the weights after it, first of {len(wrong)} tensors {wrong[0]}" if wrong else ""


def tensors_apart(a: Step, b: Step) -> list[str]:
    """Names of those whose hashes are not the same, in the order in which a token meets them."""
    if (a.start["tensors"], a.found["weights"]) == (b.start["tensors"], b.found["weights"]):
        return []
    there, here = by_tensor(a.start, a.found), by_tensor(b.start, b.found)
    return [name for name in {**there, **here} if there.get(name) != here.get(name)]


def same_layout(a: Record, b: Record) -> bool:
    keys = [key for key in {**a["config"], **b["config"]} if key.startswith(LAYOUT)]
    return a["ranks"] == b["ranks"] and all(a["config"].get(key) == b["config"].get(key) for key in keys)


def made_by(a: Record, b: Record) -> list[str]:
    """What of two starts differs: config and contents, those that define a run first; code, versions, ranks."""
    found = [change for change in changes(a["config"], b["config"]) if not _unseen(change.key)]
    found.sort(key=lambda change: change.effect != REFUSE)
    lines = [str(change).replace(" -> ", " | ") for change in found]
    for name in ("code", "versions"):
        keys = [key for key in {**a[name], **b[name]} if a[name].get(key) != b[name].get(key)]
        lines += [f"{name} {key} {a[name].get(key, 'none')} | {b[name].get(key, 'none')}" for key in keys]
    return lines + [f"{name} {a[name]} | {b[name]}" for name in ("ranks", "device", "dtype") if a[name] != b[name]]


def _unseen(key: str) -> bool:
    return key.startswith(UNSEEN) and key not in SEEN


# --- recordings


def _details(a: Path, b: Path, step: int, where: str) -> Iterator[str]:
    for folder, find in ((ROLLOUTS, _sample), (ROWS, _row)):
        paths = [run / folder / file_name(step) for run in (a, b)]
        if all(path.is_file() for path in paths):
            yield find(paths) or f"what both have recorded of step {step} is the same"
            return
    if not where.startswith(BEFORE):
        replays = "; ".join(f"aligner replay {run} --step {step}" for run in (a, b))
        yield f"sample and token are in recordings, which these make: {replays}. Then bisect the folders that they name"


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a recording ({error})") from None


def _sample(paths: Sequence[Path]) -> str:
    """The first sample, token and column of two recorded rollouts that differ; "" if none does."""
    a, b = (_load(path) for path in paths)
    if a["lengths"].shape != b["lengths"].shape:
        return f"{len(a['lengths'])} samples | {len(b['lengths'])}"
    components = sorted(name for name in a if name.startswith("scores/components/"))
    lengths = torch.maximum(a["lengths"], b["lengths"])[:, None]  # what stands behind hangs on the longest sample
    for names in (CAME, *((name,) for name in (*components, *FOUND) if name in a and name in b)):
        pairs = {name: _wide(a[name], b[name]) for name in names}
        wrong = torch.stack([_unequal(*pair) for pair in pairs.values()])
        wrong &= torch.arange(wrong.shape[-1]) < lengths
        if wrong.any():
            row, token = divmod(int(wrong.any(0).flatten().nonzero()[0]), wrong.shape[-1])
            name, (x, y) = next((n, pairs[n]) for n, w in zip(pairs, wrong, strict=True) if w[row, token])
            return f"{_name(paths[0], a, row)}{_at(a, row, token, x)}: {_two(name, x[row, token], y[row, token])}"
    return ""


def _wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [N, T] of one width; of numbers of samples T is 1."""
    a, b = (t[:, None] if t.dim() == 1 else t for t in (a, b))
    width = max(a.shape[1], b.shape[1])
    return tuple(torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in (a, b))  # type: ignore[return-value]


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _name(path: Path, a: Mapping[str, Tensor], row: int) -> str:
    header, slot = read_header(path), int(a["group"][row])
    prompt = header.prompts[header.slots.index(slot)]["id"]
    return f"sample {int(a['sample_index'][row])} of prompt {slot} (row {prompt} of the data)"


def _at(a: Mapping[str, Tensor], row: int, token: int, column: Tensor) -> str:
    if column.shape[1] == 1:
        return ""
    made = "of the answer" if token >= int(a["response_mask"][row].argmax()) else "of the prompt"
    return f", token {token} ({made})"


def _two(name: str, old: Tensor, new: Tensor) -> str:
    return f"{name.rpartition('/')[2]} {old.item()!r} | {new.item()!r}"


def _row(paths: Sequence[Path]) -> str:
    """The first row of one batch that the other lacks, and the first token that the row which is most like it has
    otherwise. Rows of a batch have no order of their own: it hangs on the layout."""
    found, told = [], []
    for columns in map(_load, paths):
        lengths, rows = columns["lengths"].tolist(), zip(columns["tokens"], columns["loss_mask"], strict=True)
        each = [list(zip(t[:n].tolist(), m[:n].tolist(), strict=True)) for n, (t, m) in zip(lengths, rows, strict=True)]
        found.append(each)
        labels = zip(each, *(columns[name].tolist() for name in LABELS if name in columns), strict=True)
        told.append(sorted(map(repr, labels)))
    missing = [[row for row in rows if row not in others] for rows, others in (found, found[::-1])]
    if not missing[0] or not missing[1]:
        return "" if told[0] == told[1] else "labels or the number of rows are others"
    row = missing[0][0]
    other = max(missing[1], key=lambda other: _common(row, other))
    token = _common(row, other)
    old, new = (f"id {r[token][0]}, mask {r[token][1]:g}" if token < len(r) else "no token" for r in (row, other))
    where = found[0].index(row)
    return f"{len(missing[0])} of {len(found[0])} rows differ: row {where} of the batch, token {token}: {old} | {new}"


def _common(a: Sequence, b: Sequence) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
