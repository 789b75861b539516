"""Adapters in the files of `peft` (0.21): adapter_model.safetensors beside adapter_config.json, out and in.

Tensors are called as in `adapters.py`: by Hugging Face's modules as files name them, experts one by one. A matrix that
some families' files join (`fused.py`) gets the factors of its parts in blocks: with A = [A1; A2] and B = [[B1, 0],
[0, B2]] it changes as its parts do, at so many times the rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.foreign import Record, read_record, record
from aligner.models.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_table
from aligner.models.families import FAMILIES
from aligner.models.fused import parts_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
KEY = "model.lora.init"
# what adapter_config.json may say without a change of what its factors mean
_IDLE = {
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *(
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the names of the tensors tell
    *("auto_mapping", "megatron_core", "qalora_group_size", "runtime_config", "ephemeral_gpu_offload"),
}
_SAME_BASE = (True, False, "gaussian", "orthogonal", "eva")  # init_lora_weights that leave the base as it is


def expected_adapter(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every factor of this model."""
    return {name: spec.shape[spec.experts :] for spec in adapter_table(cfg) for name in spec.hf}


def adapter_config(cfg: ModelConfig, base: str) -> dict[str, Any]:
    """Of an adapter for the model in the folder, or of the name, `base`. Raises ConfigError for one that peft's files
    cannot hold, or that peft would load only in part."""
    lora, modules = cfg.lora, _modules(expected_adapter(cfg))
    _check_loadable(cfg, modules)
    ranks = {}
    for stored, whole in _wholes(cfg, modules).items():
        if lora.dora and not whole.all:
            expected = f"with dora all parts of {_leaf(stored)} or none: it is one matrix in a peft folder"
            raise ConfigError("model.lora.targets", list(lora.targets), expected)
        if len(whole.parts) > 1:
            ranks[_leaf(stored)] = lora.rank * len(whole.parts)
        modules = [name for name in modules if name not in whole.parts] + [stored]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # peft refuses it for experts; after training it has no effect
        "lora_dropout": 0.0 if any(".experts." in name for name in modules) else lora.dropout,
        "target_modules": sorted({_leaf(name) for name in modules}),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "rank_pattern": ranks,
        "alpha_pattern": {leaf: _alpha(lora, rank) for leaf, rank in ranks.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }


def write_adapter(folder: Path, cfg: ModelConfig, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """All factors of the model by name, as `peft` reads them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.detach().cpu().contiguous() for name, t in _joined(cfg, tensors).items()}
    save_file({PREFIX + name: t for name, t in stored.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """All factors of the model by name, on the CPU.

    Raises ConfigError if the folder holds an adapter of another kind, rank or scale, or for other modules;
    CheckpointError if its tensors are not those of a model of this shape.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(KEY, str(folder), f"a folder with {CONFIG}, as peft writes it")
    config = read_record(folder / CONFIG, CheckpointError)
    check_config(config, cfg.lora)
    try:
        found = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / WEIGHTS}: {error}") from None
    return _parted(folder / WEIGHTS, cfg, found, config)


def check_config(config: Record, lora: LoraConfig) -> None:
    """Raises CheckpointError, naming the key of ours, for what is not LoRA, rsLoRA or DoRA of this rank and scale."""
    if config.text("peft_type") != "LORA":
        config.refuse("peft_type", "LORA")
    for key, field in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "rslora"), ("use_dora", "dora")):
        wanted = getattr(lora, field)
        found = config.flag(key, False) if isinstance(wanted, bool) else config.number(key)
        if found != wanted:
            config.refuse(key, f"{json.dumps(wanted)}, the value of model.lora.{field}: set that to the adapter's")
    if config.fields.get("init_lora_weights", True) not in _SAME_BASE:
        config.refuse("init_lora_weights", "one that leaves the base as it is: merge the adapter into its base first")
    for key, value in config.fields.items():
        if key not in _IDLE and value and (key, value) != ("bias", "none"):
            config.refuse(key, "nothing: plain LoRA, rsLoRA and DoRA are read")


def _check_loadable(cfg: ModelConfig, modules: Iterable[str]) -> None:
    """What peft 0.21 has no place for, or takes for something else."""
    experts = {_leaf(name) for name in modules if ".experts." in name}
    others = [name for name in modules if ".experts." not in name and _leaf(name) in experts]
    expected = ""
    if experts and FAMILIES[cfg.family].stacked:
        expected = f"no experts' matrices for a peft folder of family {cfg.family}, whose files stack them"
    elif others:  # it takes their targets for those of the experts alone
        expected = f"for a peft folder not both experts' matrices and {others[0]}, which peft would leave out"
    elif len(experts & {"gate_proj", "up_proj"}) == 1 or len(experts & {"w1", "w3"}) == 1:
        expected = "for a peft folder gate and up matrices of experts together, which transformers joins"
    elif experts and cfg.lora.dora:
        expected = "no experts' matrices for a peft folder with dora, which peft has for other modules alone"
    if expected:
        raise ConfigError("model.lora.targets", list(cfg.lora.targets), expected, "--merge writes the whole model.")


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _alpha(lora: LoraConfig, rank: int) -> float:
    """With which a module of another rank has the same scale."""
    times = rank / lora.rank
    return lora.alpha * (math.sqrt(times) if lora.rslora else times)


def _modules(names: Iterable[str]) -> list[str]:
    return [name.removesuffix("." + LORA_A) for name in names if name.endswith(LORA_A)]


class _Whole(NamedTuple):
    """A matrix of the files of which parts are adapted: its rows, and which are those parts'."""

    rows: int
    parts: dict[str, slice]
    all: bool  # every part is adapted


def _wholes(cfg: ModelConfig, modules: Iterable[str]) -> dict[str, _Whole]:
    adapted, found, counts = set(modules), dict[str, _Whole](), dict[str, int]()
    for name, part in parts_of(cfg).items() if FAMILIES[cfg.family].fused else ():
        stored, own = part.stored.removesuffix(".weight"), name.removesuffix(".weight")
        counts[stored] = counts.get(stored, 0) + 1
        if own in adapted:
            rows = part.index[0]
            assert isinstance(rows, slice)
            found.setdefault(stored, _Whole(part.shape[0], {}, False)).parts[own] = rows
    return {stored: whole._replace(all=len(whole.parts) == counts[stored]) for stored, whole in found.items()}


def _joined(cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the modules that files have."""
    found = dict(tensors)
    for stored, whole in _wholes(cfg, _modules(tensors)).items():
        ends = (LORA_A, LORA_B, MAGNITUDE) if cfg.lora.dora else (LORA_A, LORA_B)
        parts = {end: [found.pop(f"{name}.{end}") for name in whole.parts] for end in ends}
        rank = cfg.lora.rank
        b = parts[LORA_B][0].new_zeros(whole.rows, rank * len(whole.parts))
        for i, (rows, part) in enumerate(zip(whole.parts.values(), parts[LORA_B], strict=True)):
            b[rows, i * rank : (i + 1) * rank] = part
        found |= {f"{stored}.{LORA_A}": torch.cat(parts[LORA_A]), f"{stored}.{LORA_B}": b}
        if cfg.lora.dora:
            found[f"{stored}.{MAGNITUDE}"] = torch.cat(parts[MAGNITUDE])
    return found


def _parted(where: Path, cfg: ModelConfig, tensors: Mapping[str, Tensor], config: Record) -> dict[str, Tensor]:
    """By the modules that we have."""
    wanted, lora = expected_adapter(cfg), cfg.lora
    wholes = _wholes(cfg, _modules(wanted))
    inside = {part: stored for stored, whole in wholes.items() for part in whole.parts}
    names = {f"{inside.get(m, m)}.{end}" for m, end in map(_cut, wanted)}
    _check_names(where, set(tensors), {PREFIX + name for name in names}, lora)
    found = {name: tensors[PREFIX + name] for name in names}
    nothing = record({}, str(where), CheckpointError)
    ranks, alphas = (config.record(key, nothing) for key in ("rank_pattern", "alpha_pattern"))
    for module in sorted({inside.get(m, m) for m in _modules(wanted)}):
        rank = len(found[f"{module}.{LORA_A}"])
        told = ranks.number(_leaf(module), lora.rank), alphas.number(_leaf(module), lora.alpha)
        if told != (rank, _alpha(lora, rank)):
            what = f"{module} of rank {rank} at alpha {_alpha(lora, rank):g}, the scale of all others"
            raise CheckpointError(f"{where.parent / CONFIG}: rank {told[0]:g} and alpha {told[1]:g}: expected {what}")
        if module in wholes:
            found = _split(where, module, found, wholes[module], lora.rank)
    wrong = next((name for name, shape in wanted.items() if tuple(found[name].shape) != shape), None)
    if wrong:
        told = f"{where}: {PREFIX}{wrong} has shape {tuple(found[wrong].shape)}: expected {wanted[wrong]}"
        raise CheckpointError(f"{told}. The adapter is of another base model")
    return {name: found[name] for name in wanted}


def _cut(name: str) -> tuple[str, str]:
    """(module, what of it)."""
    end = next(end for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith("." + end))
    return name.removesuffix("." + end), end


def _check_names(where: Path, found: set[str], wanted: set[str], lora: LoraConfig) -> None:
    both = {"lacks": sorted(wanted - found), "also holds": sorted(found - wanted)}
    told = [f"{verb} {names[0]} and {len(names) - 1} more" for verb, names in both.items() if names]
    if told:
        expected = f"the modules that the adapter of {KEY} has factors for, in a model of the same layers"
        raise ConfigError("model.lora.targets", list(lora.targets), expected, f"{where} {' and '.join(told)}.")


def _split(where: Path, stored: str, found: dict[str, Tensor], whole: _Whole, rank: int) -> dict[str, Tensor]:
    """The adapted parts of a joined matrix in its place: one A for all of them, or a block for each."""
    a, b = found.pop(f"{stored}.{LORA_A}"), found.pop(f"{stored}.{LORA_B}")
    magnitude, count = found.pop(f"{stored}.{MAGNITUDE}", None), len(whole.parts)
    if len(b) != whole.rows:
        told = f"{where}: {PREFIX}{stored}.{LORA_B} has {len(b)} rows: expected {whole.rows}"
        raise CheckpointError(f"{told}. The adapter is of another base model")
    blocks = (
        [slice(i * rank, (i + 1) * rank) for i in range(count)] if len(a) == rank * count else [slice(rank)] * count
    )
    rest = b.clone()
    for (part, rows), block in zip(whole.parts.items(), blocks, strict=True):
        found |= {f"{part}.{LORA_A}": a[block].clone(), f"{part}.{LORA_B}": b[rows, block]}
        rest[rows, block] = 0
        if magnitude is not None:
            found[f"{part}.{MAGNITUDE}"] = magnitude[rows]
    if len(a) not in (rank, rank * count) or rest.any():
        expected = f"rank {rank}, or a block of it for each of {', '.join(whole.parts)} and nothing else"
        raise CheckpointError(f"{where}: {stored}: expected factors of {expected}")
    return found
