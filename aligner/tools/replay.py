"""`aligner replay RUN --step k`: execute a step of a run again, from the newest checkpoint before it, and compare.

The run's folder is only read. Steps are executed in a separate run folder, <RUN>/replays/step-<k>. It has the
checkpoint as a link and a copy of the stored rollouts, and after the replay a chain of hashes and recorded rollouts.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aligner.cluster.launch import launch
from aligner.cluster.lock import RunLock
from aligner.config.freeze import freeze, load_frozen
from aligner.config.options import from_plain
from aligner.config.resolve import compose_over, quoted
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.config.validate import validate
from aligner.errors import ConfigError
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.rollout.store import FOLDER as PENDING
from aligner.run.chain import Record
from aligner.run.marker_files import DONE, STOPPED
from aligner.tools.bisect import Step, made_by, same_layout, steps_of, tensors_apart

FOLDER = "replays"  # in the run folder
# bounds of numbers on another layout, times max(1, the number): docs/explanation/layouts.md
CLOSE = {"float32": {"loss": 1e-5, "grad_norm": 1e-5}, "bfloat16": {"loss": 5e-3, "grad_norm": 5e-2}}
ALONE = ["run.export=false", "run.eval_every=0", "run.stop.metric=''", "checkpoint.keep_best=0"]
ALONE += ["logging.trackers=[]"]


@dataclass
class Replay:
    """A replay: `cfg.debug.until` is the step, `before` the last step that is not repeated."""

    cfg: Config
    before: int
    ranks: int


def main(args: argparse.Namespace) -> int:
    """Execute and compare. Return 0 if the step is the same as recorded, 1 if it differs or failed other than by bad
    input."""
    replay = prepare(Path(args.run), args.step, args.overrides, args.ranks)
    folder = Path(replay.cfg.run.dir)
    print(f"steps {replay.before + 1} to {args.step} of {args.run}, in {folder}", flush=True)
    proof = [folder / name for name in (DONE, STOPPED)]
    with RunLock(folder):
        path = freeze(replay.cfg, folder)
        code = launch(path, replay.ranks, folder, threads=replay.cfg.cluster.threads, proof=proof)
    return code or compare(Path(args.run), folder, args.step)


def prepare(run: Path, step: int, overrides: Sequence[str] = (), ranks: int = 0) -> Replay:
    """Make the folder. Raises DataError and ConfigError before anything runs."""
    steps = steps_of(run)
    if step not in steps:
        expected = f"a step of {run}: {min(steps)} to {max(steps)}" if steps else f"a step, and {run} has done none"
        raise ConfigError("--step", step, expected)
    first, start = min(steps) - 1, steps[step].start
    cfg = load_frozen(run)
    if cfg.debug.rollout_only or not STAGES[cfg.stage.name].trains:
        raise ConfigError("RUN", str(run), "a run that trains: other runs save no state before a step")
    earlier = [entry for entry in complete_checkpoints(run / "checkpoints") if entry[0] < step]
    before, checkpoint = earlier[-1] if earlier else (first, None)
    cfg = _as_then(cfg, start["config"])
    if not earlier and before and cfg.run.resume in ("auto", "never"):
        raise ConfigError("--step", step, f"one after a checkpoint of {run}: it has none before, and began at {before}")
    folder = _free(run / FOLDER, f"step-{step:08d}")
    fixed = [*ALONE, f"run.dir={quoted(str(folder))}", f"debug.until={step}"]
    fixed += ["run.resume=auto"] if earlier or not before else []
    if not cfg.debug.train_only:
        fixed += [f"debug.record={step - before}", f"debug.replay={quoted(str(run.resolve()))}"]
    replay = Replay(compose_over(cfg, [*fixed, *overrides]), before, ranks or start["ranks"])
    validate(replay.cfg, replay.ranks)
    folder = Path(replay.cfg.run.dir)
    if folder.exists():
        raise ConfigError("run.dir", str(folder), "a folder that does not exist yet")
    try:
        _fill(folder, checkpoint, run / PENDING)
    except OSError as error:
        raise ConfigError("run.dir", str(folder), "a folder that can be written", f"{error}.") from None
    return replay


def _fill(folder: Path, checkpoint: Path | None, pending: Path) -> None:
    if checkpoint is not None:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / checkpoint.name).symlink_to(checkpoint.resolve())
    if pending.is_dir():
        shutil.copytree(pending, folder / PENDING)


def _free(folder: Path, name: str) -> Path:
    number, free = 1, folder / name
    while free.exists():
        number += 1
        free = folder / f"{name}-{number}"
    return free.resolve()


def _as_then(cfg: Config, then: Record) -> Config:
    """Return the run's config with the keys that define the run as they were: it may have resumed with others."""
    data = asdict(cfg)
    for key, value in then.items():
        *sections, name = key.split(".")
        inner: Any = data
        for section in sections:
            inner = inner.get(section, {}) if isinstance(inner, dict) else {}
        parts = value if isinstance(value, list) else [value]
        if name in inner and not any(isinstance(entry, dict) for entry in parts):  # sections are recorded without paths
            inner[name] = value
    return from_plain(Config, data)


# --- comparing


def compare(run: Path, replay: Path, step: int) -> int:
    """Print the step's quantities in both; return 0 if they are the same, as far as these layouts allow."""
    written, now = (steps_of(folder)[step] for folder in (run, replay))
    exact = same_layout(written.start, now.start)
    rows = list(_rows(written, now, exact))
    print(f"step {step} of {run}, recorded | replayed")
    for name, old, new, verdict in rows:
        print(f"  {name:<24} {old} | {new}  {verdict}")
    for line in made_by(written.start, now.start):
        print(f"also different: {line}")
    if not exact:
        within = ", ".join(f"{name} within {bound:g}" for name, bound in CLOSE[written.start["dtype"]].items())
        print(f"another layout rounds differently, more so with each step: {within}")
        print("logprobs and weights are not compared")
    same = all(verdict in ("equal", "close") for *_, verdict in rows)
    print(f"step {step} is {'the same as recorded' if same else 'DIFFERENT'}: {replay}", flush=True)
    return 0 if same else 1


def _rows(written: Step, now: Step, exact: bool) -> Iterator[tuple[str, str, str, str]]:
    there, here = written.record, now.record
    for kind, old in there["batch"].items():
        new = here["batch"].get(kind, "none")
        if exact or kind != "logprobs":
            yield kind, old, new, "equal" if old == new else "DIFFERS"
    for name, old in there["numbers"].items():
        new = here["numbers"].get(name)
        close = 0.0 if exact else CLOSE[written.start["dtype"]][name.rpartition("/")[2]]
        yield name, repr(old), repr(new), _verdict(old, new, close)
    if exact:
        count, wrong = len(written.start["tensors"]), tensors_apart(written, now)
        verdict = f"DIFFERS: {len(wrong)} of {count} tensors, first {wrong[0]}" if wrong else "equal"
        yield "weights", *(_short(side["weights"]) for side in (there, here)), verdict


def _short(weights: str) -> str:
    """Return one hash of all tensors' hashes."""
    return hashlib.blake2b(weights.encode(), digest_size=8).hexdigest()


def _verdict(old: float | None, new: float | None, close: float) -> str:
    if old == new:
        return "equal"
    near = close and old is not None and new is not None and math.isclose(old, new, rel_tol=close, abs_tol=close)
    return "close" if near else "DIFFERS"
