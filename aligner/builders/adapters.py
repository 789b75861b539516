"""The adapter that training starts from (`model.lora.init`)."""

from __future__ import annotations

from pathlib import Path

from aligner.builders.job import Job
from aligner.errors import CheckpointError, ConfigError
from aligner.foreign import read_record
from aligner.megatron.weights import WeightSource
from aligner.models.fingerprint import digest, folder_view
from aligner.models.params import from_hf
from aligner.models.peft import KEY, read_adapter
from aligner.ops.agree import same_view
from aligner.refit.export import EXTRA_FILE

BASE = "base"  # in EXTRA_FILE beside an adapter of ours: identity of the weights it was trained with


def initial_factors(job: Job) -> WeightSource:
    """Return the factors of `model.lora.init`. Collective over the world. Raises ConfigError, CheckpointError for an
    adapter that does not belong to the model of `model.init`, or differs from `model.lora`."""
    init, cfg = job.cfg.model.lora.init, job.initial.config
    folder = Path(init).expanduser()
    job.built.contents[KEY] = digest(same_view(folder, lambda: folder_view(folder), by_node=True))
    _check_base(job, folder)
    tensors = read_adapter(folder, cfg)
    job.say(f"{KEY}={init}: training starts from this adapter")
    return lambda spec: from_hf(spec, tensors, cfg)


def _check_base(job: Job, folder: Path) -> None:
    """Check the base weights of an adapter from `aligner export`; other folders are checked only by shapes."""
    if not (folder / EXTRA_FILE).is_file():
        return
    base = read_record(folder / EXTRA_FILE, CheckpointError).text(BASE)
    if base != job.initial.weights:
        expected = f"an adapter for model.init={job.cfg.model.init} ({job.initial.weights}); this one is for {base}"
        raise ConfigError(KEY, str(folder), expected)
