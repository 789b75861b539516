"""Conversions by Megatron-Bridge, where it is installed, for families that have no table here.

The result is a checkpoint for programs built on Megatron-Bridge. The stages of this project train only the families
of `families/`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from aligner.errors import CheckpointError, ConfigError
from aligner.foreign import read_record

NOTE, FOLDER = "bridge.json", "megatron"


def has_bridge() -> bool:
    return importlib.util.find_spec("megatron.bridge") is not None


def is_bridged(folder: Path) -> bool:
    """Return whether `import_folder` made `folder`."""
    return (folder / NOTE).is_file()


def import_folder(source: Path, target: Path, world_size: int) -> None:
    """Import the Hugging Face folder `source` as a checkpoint of Megatron-Bridge below `target`. Raises ConfigError."""
    _alone(world_size)
    if target.exists():
        raise ConfigError("FOLDER", str(target), "a folder that does not exist yet")
    from megatron.bridge import AutoBridge

    target.mkdir(parents=True)
    AutoBridge.import_ckpt(hf_model_id=str(source), megatron_path=str(target / FOLDER))
    (target / NOTE).write_text(json.dumps({"source": str(source.resolve())}), encoding="utf-8")


def export_folder(source: Path, target: Path, world_size: int) -> None:
    """Export the folder that `import_folder` made, or that was trained in its place, as a Hugging Face folder. Raises
    ConfigError, CheckpointError."""
    _alone(world_size)
    if not has_bridge():
        raise CheckpointError(f"{source} was imported by Megatron-Bridge, which is not installed here")
    from megatron.bridge import AutoBridge

    origin = read_record(source / NOTE, CheckpointError).text("source")
    bridge = AutoBridge.from_hf_pretrained(origin)
    bridge.export_ckpt(megatron_path=str(source / FOLDER), hf_path=str(target))


def _alone(world_size: int) -> None:
    if world_size > 1:
        raise ConfigError("--ranks", world_size, "one process: Megatron-Bridge converts this family")
