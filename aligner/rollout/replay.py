"""Recorded rollouts in place of an engine's: `debug.train_only`, `engine.name=recorded`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError, DataError
from aligner.megatron.groups import Layout
from aligner.ops.packing.routing import no_routing
from aligner.rollout.record import FOLDER, Header, Origin, read_header, read_recording
from aligner.rollout.sharing import share
from aligner.rollout.source import Rollout, Rollouts
from aligner.rollout.statistics import staleness_metrics
from aligner.run.timers import Timers


def find_recordings(path: str) -> list[Path]:
    """The files behind `debug.train_only`: a file, a folder of them, or a run folder; in the order of their steps."""
    place = Path(path).expanduser()
    folder = place / FOLDER if (place / FOLDER).is_dir() else place
    found = [place] if place.is_file() else sorted(folder.glob("step-*.safetensors"))
    if not found:
        expected = "a recorded rollout, a folder with step-*.safetensors, or a run folder (debug.record writes them)"
        raise ConfigError("debug.train_only", path, expected)
    return found


def check_origin(path: Path, header: Header, mine: Origin) -> str:
    """Raise DataError where the recording cannot be trained on by this run; a warning where it only looks odd."""
    there = header.origin
    if (there.tokenizer, there.vocab_size) != (mine.tokenizer, mine.vocab_size):
        raise DataError(
            f"{path}: recorded with another tokenizer or vocabulary (tokenizer {there.tokenizer}, model.vocab_size "
            f"{there.vocab_size}): expected tokenizer {mine.tokenizer}, model.vocab_size {mine.vocab_size}"
        )
    if (there.prompts, there.group) != (mine.prompts, mine.group):
        raise DataError(
            f"{path}: {there.prompts} prompts x {there.group} samples: expected batch.prompts={mine.prompts} x "
            f"batch.group={mine.group}"
        )
    if there.temperature != mine.temperature:
        raise DataError(
            f"{path}: sampled at temperature {there.temperature:g}: expected sampling.temperature={mine.temperature:g}"
        )
    odd = [name for name in ("model", "stage") if getattr(there, name) != getattr(mine, name)]
    return f"warning: {path} was recorded by another {' and another '.join(odd)}" if odd else ""


def _check_routing(path: Path, model: ModelConfig) -> None:
    wanted = no_routing(model)
    with safe_open(str(path), framework="pt", device="cpu") as file:
        there = "routing" in file.keys()  # noqa: SIM118 (no mapping)
        found = file.get_slice("routing").get_shape()[2:] if there else []
    if found != list(wanted.shape[2:]):
        shape = f"{found[0]} layers x {found[1]} experts" if len(found) == 2 else "none"
        expected = f"{wanted.shape[2]} layers x {wanted.shape[3]} experts for each token (mismatch.replay_routing)"
        raise DataError(f"{path}: routing: {shape}: expected {expected}. Record it with that key, by the native engine")


def check_recording(path: Path, mine: Origin, routed: ModelConfig | None) -> str:
    """As `check_origin`, also of the experts that tokens are to go to."""
    if routed is not None:
        _check_routing(path, routed)
    return check_origin(path, read_header(path), mine)


def _check_experts(path: Path, routing: Tensor, model: ModelConfig) -> None:
    wanted, count = no_routing(model).dtype, model.moe.num_experts
    if routing.dtype != wanted:
        raise DataError(f"{path}: routing in {routing.dtype}: expected {wanted} for {count} experts")
    for number in (int(routing.min()), int(routing.max())):
        if not 0 <= number < count:
            raise DataError(f"{path}: routing to expert {number}: expected numbers from 0 and below {count}")


@dataclass
class RecordedSource:
    """The rollout of each step from a file, of any data-parallel size: each rank takes the prompts that it would have
    generated for itself."""

    files: Mapping[int, Path]
    layout: Layout
    prompts: int
    version: Callable[[], int]  # of the policy's weights
    routed: ModelConfig | None = None  # the model, if its tokens go where the recorded engine sent them
    timers: Timers = field(default_factory=Timers)

    @classmethod
    def open(
        cls,
        path: str,
        steps: int,
        mine: Origin,
        layout: Layout,
        version: Callable[[], int],
        say: Callable[[str], None],
        routed: ModelConfig | None = None,
    ) -> RecordedSource:
        """Of these the i-th in the order of their steps is the rollout of step i. Each is checked before training.
        Raises ConfigError and DataError."""
        files = find_recordings(path)
        if steps > len(files):
            expected = f"at most the {len(files)} recorded rollouts of debug.train_only={path}"
            raise ConfigError("run.steps", steps, expected)
        for file in files[:steps]:
            if odd := check_recording(file, mine, routed):
                say(odd)
        return cls(dict(enumerate(files, 1)), layout, mine.prompts, version, routed)

    def next(self, step: int) -> Rollout:
        """This rank's part of the step's recording, as `RolloutSource.next` gives it."""
        with self.timers("read"):
            mine = share(self.prompts, self.layout.data, self.layout.dp_rank)
            recording = read_recording(self.files[step], range(mine.start, mine.stop))
            if self.routed is None:
                recording.rollout.routing = None
            else:
                _check_experts(self.files[step], recording.rollout.routing, self.routed)
        metrics = staleness_metrics(recording.rollout, self.version(), self.layout.pgs.dp)
        return Rollout(recording.rollout, metrics, recording.scores)


@dataclass
class Replayed:
    """Rollouts that another run has recorded; those of the steps before are the source's, whose prompts go on where it
    was asked last: it is not asked again."""

    source: Rollouts
    recorded: RecordedSource

    def next(self, step: int) -> Rollout:
        return (self.recorded if step in self.recorded.files else self.source).next(step)
