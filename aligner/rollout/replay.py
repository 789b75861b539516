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
    """Return the files of `debug.train_only`: a file, a folder of them, or a run folder; in the order of their
    steps."""
    location = Path(path).expanduser()
    folder = location / FOLDER if (location / FOLDER).is_dir() else location
    files = [location] if location.is_file() else sorted(folder.glob("step-*.safetensors"))
    if not files:
        expected = "a recorded rollout, a folder with step-*.safetensors, or a run folder (debug.record writes them)"
        raise ConfigError("debug.train_only", path, expected)
    return files


def check_origin(path: Path, header: Header, own: Origin) -> str:
    """Check that this run can train on the recording, else raise DataError. Return a warning where it only looks
    odd."""
    there = header.origin
    if (there.tokenizer, there.vocab_size) != (own.tokenizer, own.vocab_size):
        raise DataError(
            f"{path}: recorded with another tokenizer or vocabulary (tokenizer {there.tokenizer}, model.vocab_size "
            f"{there.vocab_size}): expected tokenizer {own.tokenizer}, model.vocab_size {own.vocab_size}"
        )
    if (there.prompts, there.group) != (own.prompts, own.group):
        raise DataError(
            f"{path}: {there.prompts} prompts x {there.group} samples: expected batch.prompts={own.prompts} x "
            f"batch.group={own.group}"
        )
    if there.temperature != own.temperature:
        raise DataError(
            f"{path}: sampled at temperature {there.temperature:g}: expected sampling.temperature={own.temperature:g}"
        )
    odd = [name for name in ("model", "stage") if getattr(there, name) != getattr(own, name)]
    return f"warning: {path} was recorded by another {' and another '.join(odd)}" if odd else ""


def _check_routing(path: Path, model: ModelConfig) -> None:
    wanted = no_routing(model)
    with safe_open(str(path), framework="pt", device="cpu") as file:
        there = "routing" in file.keys()  # noqa: SIM118 (no mapping)
        routing_shape = file.get_slice("routing").get_shape()[2:] if there else []
    if routing_shape != list(wanted.shape[2:]):
        shape = f"{routing_shape[0]} layers x {routing_shape[1]} experts" if len(routing_shape) == 2 else "none"
        expected = f"{wanted.shape[2]} layers x {wanted.shape[3]} experts for each token (mismatch.replay_routing)"
        raise DataError(f"{path}: routing: {shape}: expected {expected}. Record it with that key, by the native engine")


def check_recording(path: Path, own: Origin, routed: ModelConfig | None) -> str:
    """Check the origin (`check_origin`), and with `routed` also the recorded experts of tokens."""
    if routed is not None:
        _check_routing(path, routed)
    return check_origin(path, read_header(path), own)


def _check_experts(path: Path, routing: Tensor, model: ModelConfig) -> None:
    wanted, count = no_routing(model).dtype, model.moe.num_experts
    if routing.dtype != wanted:
        raise DataError(f"{path}: routing in {routing.dtype}: expected {wanted} for {count} experts")
    for number in (int(routing.min()), int(routing.max())):
        if not 0 <= number < count:
            raise DataError(f"{path}: routing to expert {number}: expected numbers from 0 and below {count}")


@dataclass
class RecordedSource:
    """The rollout of each step from a file, for any data-parallel size: each rank takes the prompts that it would
    have generated itself."""

    files: Mapping[int, Path]
    layout: Layout
    prompts: int
    version: Callable[[], int]  # of the policy's weights
    routed: ModelConfig | None = None  # the model, if its tokens go to the recorded experts
    timers: Timers = field(default_factory=Timers)

    @classmethod
    def open(
        cls,
        path: str,
        steps: int,
        own: Origin,
        layout: Layout,
        version: Callable[[], int],
        say: Callable[[str], None],
        routed: ModelConfig | None = None,
    ) -> RecordedSource:
        """Open recordings: the i-th in the order of their steps is the rollout of step i. Each is checked before
        training. Raises ConfigError and DataError."""
        files = find_recordings(path)
        if steps > len(files):
            expected = f"at most the {len(files)} recorded rollouts of debug.train_only={path}"
            raise ConfigError("run.steps", steps, expected)
        for file in files[:steps]:
            if odd := check_recording(file, own, routed):
                say(odd)
        return cls(dict(enumerate(files, 1)), layout, own.prompts, version, routed)

    def next(self, step: int) -> Rollout:
        """Return this rank's share of the step's recording, as `RolloutSource.next` does."""
        with self.timers("read"):
            own = share(self.prompts, self.layout.data, self.layout.dp_rank)
            recording = read_recording(self.files[step], range(own.start, own.stop))
            if self.routed is None:
                recording.rollout.routing = None
            else:
                _check_experts(self.files[step], recording.rollout.routing, self.routed)
        metrics = staleness_metrics(recording.rollout, self.version(), self.layout.pgs.dp)
        return Rollout(recording.rollout, metrics, recording.scores)


@dataclass
class ReplayedRollouts:
    """A source of rollouts that another run has recorded. Earlier steps are the source's, whose prompts continue
    after its last rollout: it is not called again."""

    source: Rollouts
    recorded: RecordedSource

    def next(self, step: int) -> Rollout:
        return (self.recorded if step in self.recorded.files else self.source).next(step)
