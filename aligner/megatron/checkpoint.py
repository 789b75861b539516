"""Sharded checkpoints of one ShardedModel through `megatron.core.dist_checkpointing`: saved once, loaded on any layout.

Each rank writes and reads what it has (`megatron/shards.py`), so a run may resume on another TP x PP x DP.
"""

from __future__ import annotations

import json
import os
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, StrictHandling
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import CheckpointError
from aligner.files import file_hash
from aligner.megatron.checkpoint_index import check_before_loading, noted_checksums
from aligner.megatron.ema import EMA
from aligner.megatron.lora import attach
from aligner.megatron.optimizer_state import give_state, set_step
from aligner.megatron.quantized_base import round_base
from aligner.megatron.shards import optimizer_shards, weight_shards
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import broadcast_to_copies
from aligner.ops.agree import by_rank_0, fail_together

MAIN = "param"  # the files' name for float32 copies of bfloat16 weights
PLAIN_MAIN = "fp32_param"  # in files of earlier versions, if the optimizer was not distributed


def weight_state(model: ShardedModel) -> dict[str, Any]:
    """Return tensors by name; of a model with adapters only the trained ones. `_extra_state` of modules is left out:
    only float8 needs TransformerEngine's, which it unpickles, and other modules that read the checkpoint have none.
    """
    if model.adapted is not None:
        return _trained(model)
    state = model.module.sharded_state_dict(metadata={"dp_cp_group": model.layout.pgs.dp_cp})
    return {name: item for name, item in state.items() if not isinstance(item, ShardedObject)}


def _trained(model: ShardedModel) -> dict[str, Any]:
    state = model.adapted.sharded_state(model.module)
    if model.head.kind == "score" and model.layout.is_last_stage:
        metadata = {"dp_cp_group": model.layout.pgs.dp_cp}
        state |= model.module.output_layer.sharded_state_dict("output_layer.", metadata=metadata)
    return state


def own_state(model: ShardedModel) -> dict[str, Any]:
    """Return what this rank writes of a model and its optimizer."""
    state: dict[str, Any] = {"model": weight_state(model), "step_count": model.step_count}
    if model.optimizer is not None:
        give_state(model.optimizer)  # a policy that waits for its critic to warm up has not stepped yet
        state["shards"] = optimizer_shards(state["model"], model.optimizer, MAIN)
        if model.ema is not None:
            state["ema"] = model.ema.shards(state["model"])
        state["model"] = weight_shards(state["model"], model.optimizer)
    return state


class ModelSave:
    """One model's weights and optimizer on their way into `folder`: planned by all ranks together, written by each
    rank separately (in any thread, without messages), finished by all together.

    With `copy` training may continue while it is written: this rank's share lies in host memory until then. (From a
    GPU it is copied there in any case.)
    """

    def __init__(self, model: ShardedModel, folder: Path, copy: bool):
        """Plan the save. Collective over the world. The folder exists. Raises OSError or RuntimeError."""
        self.folder = folder
        self.hashes: dict[str, str] = {}  # of the files that this rank has written
        state = own_state(model)
        # A plain queue spares the manager process that Megatron would spawn (20 s of imports on a laptop) for writers
        # in other processes; one for each save, so that a failed one leaves no results.
        filesystem_async._results_queue = queue.Queue()
        self._request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
        self._arguments = list(self._request.async_fn_args)
        if self._request.preload_fn is not None:
            buckets = self._request.preload_fn()  # from a GPU new memory
            on_host = model.device.type == "cpu"
            self._arguments[1] = [_copied(bucket) for bucket in buckets] if copy and on_host else buckets

    def write(self) -> None:
        """Write and hash this rank's files. `finish` raises what fails here."""
        if self._request.async_fn is None:  # this rank holds nothing that another one does not write
            return
        self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)
        for path, *_ in self._arguments[1]:
            if os.path.exists(path):
                self.hashes[os.path.basename(path)] = file_hash(path)
        self._arguments = []

    def finish(self) -> None:
        """Write what describes the files of all ranks. Collective over the world. Raises OSError or RuntimeError if
        any rank could not write."""
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:  # torch's, a BaseException: one failure for each rank that had one
            raise OSError(_first_failure(error)) from error
        parts: list[dict[str, str] | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.hashes, parts, dst=0)
        if parts is None:
            return
        files = {name: digest for hashes in parts for name, digest in (hashes or {}).items()}
        for path in self.folder.iterdir():
            files.setdefault(path.name, file_hash(path))
        content = {"algorithm": "sha256", "files": files}  # in Megatron's format: `load_model` has it checked
        (self.folder / INTEGRITY_FNAME).write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")


def _copied(bucket: tuple) -> tuple:
    path, key, (objects, tensors) = bucket
    return path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors])


def save_model(model: ShardedModel, folder: Path) -> None:
    """Write weights and optimizer of all ranks into `folder` (made if missing). Collective over the world. Raises
    OSError or RuntimeError if that fails."""
    by_rank_0(lambda: folder.mkdir(parents=True, exist_ok=True))
    save = ModelSave(model, folder, copy=False)
    save.write()
    save.finish()


def load_model(model: ShardedModel, folder: Path, with_optimizer: bool = True, with_head: bool = True) -> None:
    """Load what `save_model` wrote, on any layout. Without `with_head` the model keeps its own head. Collective.

    Learning rates, weight decay, betas and eps stay those of the model's own config. If the folder has no average of
    the weights, the average begins with the folder's weights.

    Raises CheckpointError naming the folder, the same on all ranks.
    """
    with_optimizer = with_optimizer and model.optimizer is not None
    state: dict[str, Any] = {"model": weight_state(model), "step_count": 0}
    names, error = _verified(folder), ""
    try:
        if with_optimizer:
            give_state(model.optimizer)
            state["shards"] = optimizer_shards(
                state["model"], model.optimizer, PLAIN_MAIN if PLAIN_MAIN in names else MAIN
            )
            if model.ema is not None and EMA in names:
                state["ema"] = model.ema.shards(state["model"])
        if not with_head:
            state["model"].pop("output_layer.weight", None)  # only the last pipeline stage has it
        read_here, copied = _read_once(model, state["model"])
        state["model"] = _parts(read_here)
        loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.ASSUME_OK_UNEXPECTED)
    except (OSError, RuntimeError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as cause:
        error = f"cannot load checkpoint {folder}: {cause}"
    except CheckpointException as cause:  # a BaseException
        error = f"cannot load checkpoint {folder}: {_first_failure(cause)}"
    fail_together(error, CheckpointError)  # before copies wait for what the first of them could not read
    if read_here:  # else Megatron has nothing at this key
        model.module.load_state_dict(loaded["model"], strict=False)
    for tensor, copies in copied:
        broadcast_to_copies(tensor, copies)
    if with_optimizer:  # whose shards have been read into their places
        model.step_count = int(loaded["step_count"])
        set_step(model.optimizer, model.step_count)
        if model.ema is not None and EMA not in names:
            model.ema.restart()
    elif model.optimizer is not None:
        model.optimizer.reload_model_params()


def _read_once(
    model: ShardedModel, state: dict[str, Any]
) -> tuple[dict[str, Any], list[tuple[Tensor, dist.ProcessGroup]]]:
    """Return what this rank reads of weights that all data-parallel copies need: everything on the first copy. Also
    return each tensor, in which Megatron replaces others while it loads, with the group that receives it."""
    groups = {name: model.layout.copies(not getattr(item.data, "allreduce", True)) for name, item in state.items()}
    read_here = {name: item for name, item in state.items() if groups[name].rank() == 0}
    return read_here, [(item.data, groups[name]) for name, item in state.items()]


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """Split gate and up, which Megatron reads one by one and joins again, into the views that are read into.
    Otherwise a copy of all of them would lie beside the weights."""
    entries = {name: item for name, item in state.items() if not isinstance(item, ShardedTensorFactory)}
    for name in state.keys() - entries.keys():
        entries |= {f"{name}/{i}": view for i, view in enumerate(nested_values(state[name].build()))}
    return entries


def merge_adapters(model: ShardedModel, folder: Path, lora: LoraConfig, with_head: bool) -> None:
    """Merge adapters of another run, as `save_model` wrote them, into the weights that they were trained with.
    Collective. Raises CheckpointError."""
    config = replace(model.cfg, lora=lora)
    round_base(model.module, config)
    model.adapted = attach(model.module, config, model.layout, model.head, seed=0)
    load_model(model, folder, with_head=with_head)
    model.adapted.dissolve()
    model.adapted = None


def _verified(folder: Path) -> set[str]:
    """Return which of PLAIN_MAIN and EMA a checkpoint has, after checking its files against their checksums. Rank 0
    reads the index and the objects, each rank its share of the files. Collective. Raises CheckpointError, the same on
    all ranks."""

    def check() -> tuple[set[str], dict[str, str]]:
        index = check_before_loading(folder)
        kinds = {PLAIN_MAIN: f"optimizer.state.{PLAIN_MAIN}.", EMA: f"{EMA}."}
        names = {kind for kind, prefix in kinds.items() if any(k.startswith(prefix) for k in index.state_dict_metadata)}
        return names, noted_checksums(folder, index)

    names, hashes = by_rank_0(check)
    wrong = ""
    try:
        wrong = _wrong_file(folder, hashes)
    except OSError as error:
        wrong = str(error)
    fail_together(wrong, CheckpointError)
    return names


def _wrong_file(folder: Path, hashes: dict[str, str]) -> str:
    """Return an error for the first wrong file in this rank's share, or "". Each file is hashed by one rank."""
    for name in sorted(hashes)[dist.get_rank() :: dist.get_world_size()]:
        if file_hash(folder / name) != hashes[name]:
            return f"cannot load checkpoint {folder}: {name} does not have the checksum of {INTEGRITY_FNAME}"
    return ""


def _first_failure(error: CheckpointException) -> str:
    if not error.failures:  # only rank 0 knows the causes of a failed write
        return "another rank failed"
    rank, (cause, _) = min(error.failures.items())
    return f"{cause!r} on rank {rank}"


def rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.random.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
