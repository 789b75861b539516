"""`aligner bisect A B`: the first step at which two runs differ, the quantity that differs first, and the inputs that
differ.

The hashes of steps.jsonl give step, quantity and tensor. Recordings of both runs (`debug.record`, `aligner replay`)
also give the sample and the token.
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
UNSEEN = ("logging.", "checkpoint.", "eval.", "run.")  # keys that no step depends on, except these
SEEN = ("run.steps", "run.deterministic")
LABELS = ("labels", "told_by")  # of rows
GENERATED = ("tokens", "rollout_logprobs")  # token by token
# then, in the order in which a step computes them, after the components of the rewards
COMPUTED = (
    "rewards",
    "valid",
    *(f"{TRAINED}{name}" for name in ("old_logprobs", "ref_logprobs", "values", "token_weights")),
)
COMPUTED += tuple(f"{TRAINED}{name}" for name in ("token_rewards", "returns", "advantages"))
BEFORE = "the weights before it"


class Step(NamedTuple):
    """Record of a step, the record before it, which has the weights that it begins with, and the start that computed
    it."""

    record: Record
    before: Record
    start: Record


def main(args: argparse.Namespace) -> int:
    """Print the first difference. Return 0 if no common step differs, 1 if one does."""
    runs = Path(args.run), Path(args.other)
    lines = list(bisect(*runs))
    print("\n".join(lines), flush=True)
    return int(lines[0].startswith("differ"))


def bisect(a: Path, b: Path) -> Iterator[str]:
    """Yield the report's lines; the first begins with `differ` if the runs do. Raises DataError."""
    there, here = steps_of(a), steps_of(b)
    both = sorted(there.keys() & here.keys())
    if not both:
        raise DataError(f"{a} and {b}: expected runs that have a step in common")
    for step in both:
        difference = _difference(there[step], here[step])
        if difference:
            yield f"differ at step {step} of {both[0]} to {both[-1]}: {difference}"
            for line in made_by(there[step].start, here[step].start):
                yield f"also different: {line}"
            yield from _details(a, b, step, difference)
            return
    yield f"the same: steps {both[0]} to {both[-1]}"


def steps_of(run: Path) -> dict[int, Step]:
    """Return the steps of a run. Raises DataError."""
    steps: dict[int, Step] = {}
    before, start = {}, {}
    for record in read_chain(run):
        if "start" in record:
            start = record["start"]
        else:
            steps[record["step"]] = Step(record, before, start)
        before = record
    return steps


def _difference(a: Step, b: Step) -> str:
    """Return the first quantity of a step that differs; "" for none."""
    there, here = a.record, b.record
    if wrong := tensors_apart(a._replace(record=a.before), b._replace(record=b.before)):
        return f"{BEFORE}, first of {len(wrong)} tensors {wrong[0]}"
    for kind in PARTS:
        if there["batch"].get(kind) != here["batch"].get(kind):
            return kind
    for name in {**there["numbers"], **here["numbers"]}:
        old, new = there["numbers"].get(name), here["numbers"].get(name)
        if old != new:
            return f"{name} {old!r} | {new!r}"
    wrong = tensors_apart(a, b)
    return f"the weights after it, first of {len(wrong)} tensors {wrong[0]}" if wrong else ""


def tensors_apart(a: Step, b: Step) -> list[str]:
    """Return the names of tensors whose hashes differ, in the order in which a token meets them."""
    if (a.start["tensors"], a.record["weights"]) == (b.start["tensors"], b.record["weights"]):
        return []
    there, here = by_tensor(a.start, a.record), by_tensor(b.start, b.record)
    return [name for name in {**there, **here} if there.get(name) != here.get(name)]


def same_layout(a: Record, b: Record) -> bool:
    keys = [key for key in {**a["config"], **b["config"]} if key.startswith(LAYOUT)]
    return a["ranks"] == b["ranks"] and all(a["config"].get(key) == b["config"].get(key) for key in keys)


def made_by(a: Record, b: Record) -> list[str]:
    """Return the differences of two starts: config and contents, those that define a run first; code, versions,
    ranks."""
    changed = [change for change in changes(a["config"], b["config"]) if not _unseen(change.key)]
    changed.sort(key=lambda change: change.effect != REFUSE)
    lines = [str(change).replace(" -> ", " | ") for change in changed]
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
            yield find(paths) or f"the recordings of step {step} are the same"
            return
    if not where.startswith(BEFORE):
        replays = "; ".join(f"aligner replay {run} --step {step}" for run in (a, b))
        yield f"to find sample and token, make recordings: {replays}. Then bisect the folders that they print"


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a recording ({error})") from None


def _sample(paths: Sequence[Path]) -> str:
    """Return the first sample, token and column of two recorded rollouts that differ; "" if none does."""
    a, b = (_load(path) for path in paths)
    if a["lengths"].shape != b["lengths"].shape:
        return f"{len(a['lengths'])} samples | {len(b['lengths'])}"
    components = sorted(name for name in a if name.startswith("scores/components/"))
    lengths = torch.maximum(a["lengths"], b["lengths"])[:, None]  # the padding behind depends on the longest sample
    for names in (GENERATED, *((name,) for name in (*components, *COMPUTED) if name in a and name in b)):
        pairs = {name: _wide(a[name], b[name]) for name in names}
        wrong = torch.stack([_unequal(*pair) for pair in pairs.values()])
        wrong &= torch.arange(wrong.shape[-1]) < lengths
        if wrong.any():
            row, token = divmod(int(wrong.any(0).flatten().nonzero()[0]), wrong.shape[-1])
            name, (x, y) = next((n, pairs[n]) for n, w in zip(pairs, wrong, strict=True) if w[row, token])
            return f"{_name(paths[0], a, row)}{_at(a, row, token, x)}: {_two(name, x[row, token], y[row, token])}"
    return ""


def _wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as [N, T] of one width; T is 1 for one number a sample."""
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
    """Return the first row of one batch that the other lacks, and the first token at which the most similar row
    differs. Rows of a batch have no order of their own: it depends on the layout."""
    rows_by_batch, labels_by_batch = [], []
    for columns in map(_load, paths):
        lengths, rows = columns["lengths"].tolist(), zip(columns["tokens"], columns["loss_mask"], strict=True)
        each = [list(zip(t[:n].tolist(), m[:n].tolist(), strict=True)) for n, (t, m) in zip(lengths, rows, strict=True)]
        rows_by_batch.append(each)
        labels = zip(each, *(columns[name].tolist() for name in LABELS if name in columns), strict=True)
        labels_by_batch.append(sorted(map(repr, labels)))
    missing = [[row for row in rows if row not in others] for rows, others in (rows_by_batch, rows_by_batch[::-1])]
    if not missing[0] or not missing[1]:
        return "" if labels_by_batch[0] == labels_by_batch[1] else "labels or the number of rows differ"
    row = missing[0][0]
    other = max(missing[1], key=lambda other: _common(row, other))
    token = _common(row, other)
    old, new = (f"id {r[token][0]}, mask {r[token][1]:g}" if token < len(r) else "no token" for r in (row, other))
    where = rows_by_batch[0].index(row)
    counts = f"{len(missing[0])} of {len(rows_by_batch[0])} rows differ"
    return f"{counts}: row {where} of the batch, token {token}: {old} | {new}"


def _common(a: Sequence, b: Sequence) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
