"""Adapters in the files of `peft` (0.21), adapter_model.safetensors and adapter_config.json: reading and writing.

Tensors are named as in `adapters.py`: by Hugging Face's modules in files, experts one by one. A matrix that some
families' files join (`fused.py`) gets the factors of its parts in blocks. With A = [A1; A2] and B = [[B1, 0], [0, B2]]
it changes like its parts, with the rank multiplied by their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.foreign import read_record
from aligner.models.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_table
from aligner.models.fused import joined_rows
from aligner.models.params import expected_hf_shapes
from aligner.models.peft_rules import Rules, check_kind

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
KEY = "model.lora.init"


def expected_adapter(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every factor of this model."""
    return {name: spec.shape[spec.experts :] for spec in adapter_table(cfg) for name in spec.hf}


def adapter_config(cfg: ModelConfig, base: str) -> dict[str, Any]:
    """Return adapter_config.json for a base model given by its folder or name.

    Raises ConfigError for an adapter that peft's files cannot hold, or that peft would load only in part.
    """
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
        "alpha_pattern": {leaf: _alpha(lora, rank) for leaf, rank in ranks.items()} | _experts_alpha(lora, modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }


def write_adapter(folder: Path, cfg: ModelConfig, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write all factors of the model by name, as `peft` reads them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.detach().cpu().contiguous() for name, t in _joined(cfg, tensors).items()}
    save_file({PREFIX + name: t for name, t in stored.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """Read all factors of the model by name, on the CPU.

    Raises ConfigError if the folder holds an adapter of another kind, rank or scale, or for other modules;
    CheckpointError if its tensors are not those of a model of this shape.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(KEY, str(folder), f"a folder with {CONFIG}, as peft writes it")
    config = read_record(folder / CONFIG, CheckpointError)
    check_kind(config, cfg.lora)
    rules = Rules(config)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / WEIGHTS}: {error}") from None
    return _parted(folder / WEIGHTS, cfg, tensors, rules)


def _check_loadable(cfg: ModelConfig, modules: Sequence[str]) -> None:
    """Refuse adapters that peft 0.21 cannot store, or would misread."""
    experts = {_leaf(name) for name in modules if ".experts." in name}
    others = [name for name in modules if ".experts." not in name and _leaf(name) in experts]
    expected = ""
    if experts and cfg.traits.stacked:
        expected = f"no experts' matrices for a peft folder of family {cfg.family}, whose files stack them"
    elif cfg.traits.entries:
        expected = f"no adapter of family {cfg.family} for a peft folder: transformers' modules have other names"
    elif cfg.traits.mamba and any(_leaf(name) == "out_proj" for name in modules):
        expected = f"no out_proj for a peft folder of family {cfg.family}: peft refuses it"
    elif others:  # peft applies their targets only to the experts
        expected = f"for a peft folder not both experts' matrices and {others[0]}, which peft would leave out"
    elif len(experts & {"gate_proj", "up_proj"}) == 1 or len(experts & {"w1", "w3"}) == 1:
        expected = "for a peft folder gate and up matrices of experts together, which transformers joins"
    elif experts and cfg.lora.dora:
        expected = "no experts' matrices for a peft folder with dora, which peft supports only for other modules"
    if expected:
        raise ConfigError("model.lora.targets", list(cfg.lora.targets), expected, "--merge writes the whole model.")


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _experts_alpha(lora: LoraConfig, modules: Iterable[str]) -> dict[str, float]:
    """Return the alpha pattern of experts' gate and up for transformers 5.

    peft joins them there at twice the rank and twice alpha, which is the same scale only without rslora.
    """
    gates = any(times == 2 for name in modules for _, times in _stacked(name))
    return {"experts.gate_up_proj": _alpha(lora, 2 * lora.rank)} if lora.rslora and gates else {}


def _alpha(lora: LoraConfig, rank: int) -> float:
    """Return the alpha that gives a module of another rank the same scale."""
    times = rank / lora.rank
    return lora.alpha * (math.sqrt(times) if lora.rslora else times)


def _modules(names: Iterable[str]) -> list[str]:
    return [name.removesuffix("." + LORA_A) for name in names if name.endswith(LORA_A)]


class _Whole(NamedTuple):
    """A matrix of the files with adapted parts: its number of rows, and the rows of each adapted part."""

    rows: int
    parts: dict[str, slice]
    all: bool  # every part is adapted


def _wholes(cfg: ModelConfig, modules: Iterable[str]) -> dict[str, _Whole]:
    adapted, wholes, counts = set(modules), dict[str, _Whole](), dict[str, int]()
    for name, matrix in joined_rows(cfg.traits, expected_hf_shapes(cfg)).items() if cfg.traits.fused else ():
        stored, own = matrix.stored.removesuffix(".weight"), name.removesuffix(".weight")
        counts[stored] = counts.get(stored, 0) + 1
        if own in adapted:
            rows = matrix.index[0]
            assert isinstance(rows, slice)
            wholes.setdefault(stored, _Whole(matrix.shape[0], {}, False)).parts[own] = rows
    return {stored: whole._replace(all=len(whole.parts) == counts[stored]) for stored, whole in wholes.items()}


def _joined(cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors by the modules of files."""
    factors = dict(tensors)
    for stored, whole in _wholes(cfg, _modules(tensors)).items():
        ends = (LORA_A, LORA_B, MAGNITUDE) if cfg.lora.dora else (LORA_A, LORA_B)
        parts = {end: [factors.pop(f"{name}.{end}") for name in whole.parts] for end in ends}
        rank = cfg.lora.rank
        b = parts[LORA_B][0].new_zeros(whole.rows, rank * len(whole.parts))
        for i, (rows, block) in enumerate(zip(whole.parts.values(), parts[LORA_B], strict=True)):
            b[rows, i * rank : (i + 1) * rank] = block
        factors |= {f"{stored}.{LORA_A}": torch.cat(parts[LORA_A]), f"{stored}.{LORA_B}": b}
        if cfg.lora.dora:
            factors[f"{stored}.{MAGNITUDE}"] = torch.cat(parts[MAGNITUDE])
    return factors


def _parted(where: Path, cfg: ModelConfig, tensors: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Return the factors by the modules of this project."""
    wanted, lora = expected_adapter(cfg), cfg.lora
    wholes = _wholes(cfg, _modules(wanted))
    inside = {module: stored for stored, whole in wholes.items() for module in whole.parts}
    names = {f"{inside.get(m, m)}.{end}" for m, end in map(_cut, wanted)}
    adapted = sorted({_cut(name)[0] for name in names})
    left_out = next((m for m in adapted if f"{PREFIX}{m}.{LORA_A}" not in tensors and not rules.adapts(m)), None)
    if left_out and rules.narrowed:
        rules.refuse_targets(f"none that leaves out {left_out}, which model.lora.targets={list(lora.targets)} adapts")
    _check_names(where, set(tensors), {PREFIX + name for name in names}, lora)
    _check_targets(cfg, set(adapted), rules)
    factors = {name: tensors[PREFIX + name] for name in names}
    for module in sorted({inside.get(m, m) for m in _modules(wanted)}):
        rows, parts = len(factors[f"{module}.{LORA_A}"]), wholes[module].parts if module in wholes else ()
        _check_scale(where, module, rows, len(parts), lora, rules)
        if parts:
            factors = _split(where, module, factors, wholes[module], lora.rank)
    wrong = next((name for name, shape in wanted.items() if tuple(factors[name].shape) != shape), None)
    if wrong:
        fault = f"{where}: {PREFIX}{wrong} has shape {tuple(factors[wrong].shape)}: expected {wanted[wrong]}"
        raise CheckpointError(f"{fault}. The adapter is of another base model")
    return {name: factors[name] for name in wanted}


def _check_targets(cfg: ModelConfig, adapted: set[str], rules: Rules) -> None:
    """Check that adapter_config.json targets exactly the modules with factors in the file."""
    everything = replace(cfg, lora=replace(cfg.lora, targets=[ALL_LINEAR]))
    linear = _modules(expected_adapter(everything))
    wholes = _wholes(everything, linear)
    inside = {module: stored for stored, whole in wholes.items() for module in whole.parts}
    for module in dict.fromkeys(inside.get(m, m) for m in linear):
        if rules.adapts(module) != (module in adapted):
            verb = "with" if module in adapted else "without"
            rules.refuse_targets(f"modules {verb} {module}, as {WEIGHTS} in that folder has")


def _check_scale(where: Path, module: str, rows: int, parts: int, lora: LoraConfig, rules: Rules) -> None:
    """Check that a module has the rank and scale of `model.lora`; a joined one has a multiple of the rank."""
    rank = rules.rank(module)
    if rank not in (lora.rank, lora.rank * parts):
        _refuse_value(rules, "rank", module, lora.rank)
    if rank != rows:
        fault = f"{where}: {PREFIX}{module}.{LORA_A} has {rows} rows"
        raise CheckpointError(f"{fault}: expected {rank:g}, its rank by {CONFIG}")
    if rules.alpha(module) != _alpha(lora, rows):
        _refuse_value(rules, "alpha", module, _alpha(lora, rows))
    for stacked, times in _stacked(module):
        for kind, value in (("rank", lora.rank * times), ("alpha", _alpha(lora, lora.rank * times))):
            if rules.has_pattern(kind, stacked) and getattr(rules, kind)(stacked) != value:
                rules.refuse(kind, stacked, f"{value:g} for {stacked}, which has {times} of the experts' matrices")


def _refuse_value(rules: Rules, kind: str, module: str, wanted: float) -> NoReturn:
    expected = f"{wanted:g}, by model.lora.{kind}: set that to the adapter's"
    if rules.has_pattern(kind, module):
        expected = f"{wanted:g} for {module}, as model.lora has one {kind} for all; or merge the adapter into its base"
    rules.refuse(kind, module, expected)


def _stacked(module: str) -> list[tuple[str, int]]:
    """Return the tensor in which transformers 5 stacks all experts' matrices, and how many kinds it joins.

    peft also looks up patterns for it.
    """
    before, experts, rest = module.partition(".experts.")
    if not experts:
        return []
    before = before.removesuffix("block_sparse_moe") + "mlp" if before.endswith("block_sparse_moe") else before
    down = _leaf(rest) in ("down_proj", "w2")
    return [(f"{before}.experts.{'down_proj' if down else 'gate_up_proj'}", 1 if down else 2)]


def _cut(name: str) -> tuple[str, str]:
    """Return (module, kind of factor)."""
    end = next(end for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith("." + end))
    return name.removesuffix("." + end), end


def _check_names(where: Path, stored: set[str], wanted: set[str], lora: LoraConfig) -> None:
    both = {"lacks": sorted(wanted - stored), "also holds": sorted(stored - wanted)}
    faults = [f"{verb} {names[0]} and {len(names) - 1} more" for verb, names in both.items() if names]
    if faults:
        expected = f"the modules that the adapter of {KEY} has factors for, in a model with the same layers"
        raise ConfigError("model.lora.targets", list(lora.targets), expected, f"{where} {' and '.join(faults)}.")


def _split(where: Path, stored: str, factors: dict[str, Tensor], whole: _Whole, rank: int) -> dict[str, Tensor]:
    """Replace the factors of a joined matrix by those of its adapted parts.

    The parts share one A, or have a block each.
    """
    a, b = factors.pop(f"{stored}.{LORA_A}"), factors.pop(f"{stored}.{LORA_B}")
    magnitude, count = factors.pop(f"{stored}.{MAGNITUDE}", None), len(whole.parts)
    if len(b) != whole.rows:
        fault = f"{where}: {PREFIX}{stored}.{LORA_B} has {len(b)} rows: expected {whole.rows}"
        raise CheckpointError(f"{fault}. The adapter is of another base model")
    blocks = (
        [slice(i * rank, (i + 1) * rank) for i in range(count)] if len(a) == rank * count else [slice(rank)] * count
    )
    rest = b.clone()
    for (module, rows), block in zip(whole.parts.items(), blocks, strict=True):
        factors |= {f"{module}.{LORA_A}": a[block].clone(), f"{module}.{LORA_B}": b[rows, block]}
        rest[rows, block] = 0
        if magnitude is not None:
            factors[f"{module}.{MAGNITUDE}"] = magnitude[rows]
    if len(a) not in (rank, rank * count) or rest.any():
        expected = f"rank {rank}, or a block of it for each of {', '.join(whole.parts)} and nothing else"
        raise CheckpointError(f"{where}: {stored}: expected factors of {expected}")
    return factors
