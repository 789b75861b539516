"""A native engine from a Hugging Face folder, for tools without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.engines.native.engine import Decode, NativeEngine
from aligner.families.hf_config import config_from_hf
from aligner.families.table import ahead_name
from aligner.models.folder_check import check_folder
from aligner.models.safetensors_io import HfTensors, open_hf

_MAPPED = 1 << 26  # bytes of a file that count as this process's memory


def engine_from_folder(
    folder: Path,
    config: EngineConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    pad_id: int,
    decode: Decode | None = None,
    kind: type[NativeEngine] = NativeEngine,
    group: dist.ProcessGroup | None = None,
) -> NativeEngine:
    """Return an engine with weight version 0; with a `group`, one of its ranks. Raises CheckpointError or ConfigError
    if the folder holds no model of a known family."""
    shape, how = config_from_hf(folder), {"pad_id": pad_id, "decode": decode, "group": group}
    if config.draft_tokens and not config.draft_model and predicts_ahead(open_hf(folder), shape):
        shape = replace(shape, mtp=MtpConfig(1))
    engine = kind(shape, config, device=device, dtype=dtype, **how)
    fill(engine, folder)
    return engine


def predicts_ahead(tensors: HfTensors, shape: ModelConfig) -> bool:
    """Return whether a folder has a layer for multi-token prediction that engines here compute."""
    own = shape.traits.trains_ahead and tensors.announced_ahead(shape.traits.predicts_ahead) == 1
    return own and ahead_name(shape, f"model.layers.{shape.num_layers}.eh_proj.weight") in tensors


def fill(engine: NativeEngine, folder: Path) -> None:
    """Fill the engine with the folder's weights, as version 0. Of several ranks that are one engine each reads all.
    Raises CheckpointError if the folder holds other tensors than the engine's model."""
    tensors = open_hf(folder, bool(engine.model.cfg.mtp.layers))
    names = check_folder(tensors, engine.model.cfg)
    engine.begin_update(0)
    engine.update_weights(read(tensors, names))
    engine.finish_update()


def read(tensors: HfTensors, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield these tensors of a folder; what was read does not stay this process's memory."""
    mapped = 0
    for name in names:
        tensor = tensors[name]
        mapped += tensor.nbytes
        yield name, tensor
        if mapped > _MAPPED:
            tensors.close()
            mapped = 0
