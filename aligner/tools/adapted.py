"""Weights exported from a checkpoint, one parameter at a time: as stored, or, if it has adapters (`model.lora`), merged
into the weights that they were trained with. Adapters can also be exported alone, as `peft` reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from aligner.builders.adapters import BASE
from aligner.config.freeze import load_frozen
from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.families.table import family_table
from aligner.megatron.checkpoint_files import read_checked
from aligner.megatron.chunks import Blocks, StorageLocation
from aligner.megatron.model import Head
from aligner.models.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_table, held_sites
from aligner.models.params import ParamSpec, dtype_of, to_hf
from aligner.models.peft import adapter_config, write_adapter
from aligner.ops.kernels.frozen import Frozen
from aligner.refit.export import EXTRA_FILE
from aligner.roles.model_init import InitialModel

OUTPUT = "output_layer.weight"
Tensors = Callable[[ParamSpec, int], dict[str, Tensor]]


@dataclass
class Stored:
    """Weights of a checkpoint."""

    blocks: Blocks
    where: Mapping[str, StorageLocation]
    cfg: ModelConfig

    def dtype(self, spec: ParamSpec) -> torch.dtype:
        return self.blocks.dtype(self.where[spec.canonical].key)

    def tensors(self, spec: ParamSpec, first: int = 0) -> dict[str, Tensor]:
        """Return tensors by Hugging Face's names. A row of experts (`of_experts`) begins with expert `first`."""
        position = self.where[spec.canonical]
        offsets = position.offsets((first, *[0] * (len(spec.shape) - 1)))
        return to_hf(
            spec, self.blocks.region(position.key, offsets, position.shape(spec.shape)).view(spec.shape), self.cfg
        )


class Adapter:
    """The adapters of one checkpoint, which are added to weights as `cfg.lora` says."""

    def __init__(self, folder: Path, cfg: ModelConfig):
        self.cfg, self.blocks, self.table = cfg, Blocks(folder), adapter_table(cfg)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the run computed."""
        return self.blocks.dtype(self.table[0].canonical)

    @cached_property
    def factors(self) -> dict[str, Tensor]:
        """Factors by Hugging Face's names."""
        regions = (
            (spec, self.blocks.region(spec.canonical, (0,) * len(spec.shape), spec.shape)) for spec in self.table
        )
        return {name: t for spec, region in regions for name, t in to_hf(spec, region, self.cfg).items()}

    @cached_property
    def _held(self) -> set[str]:
        held = self.cfg.lora.quantize_base != "none"
        return {name for site in held_sites(self.cfg) for name in site.base.hf} if held else set()

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return W + scale B A, in float32 and rounded once, with W as it was held."""
        factors, at = self.factors, name.removesuffix("weight")
        if name in self._held:
            weight = Frozen.of(weight, self.cfg.lora.quantize_base).dense(weight.dtype)
        if at + LORA_A not in factors:
            return weight
        product = factors[at + LORA_B].float() @ factors[at + LORA_A].float()
        merged = weight.float() + self.cfg.lora.scale * product
        if at + MAGNITUDE in factors:
            merged *= (factors[at + MAGNITUDE] / merged.norm(dim=1))[:, None]
        return merged.to(weight.dtype)


@dataclass
class Merged:
    """Weights that a run's engine had; same interface as `Stored`."""

    adapters: list[Adapter]  # each trained with the base that the ones before it were merged into
    base: Tensors
    head: Head

    @classmethod
    def of(cls, initial: InitialModel, head: Head, where: Mapping[str, StorageLocation]) -> Merged:
        cfg = initial.config
        adapters = [Adapter(folder, replace(cfg, lora=lora)) for folder, lora in initial.adapters]
        if initial.checkpoint is not None:
            return cls(adapters, Stored(Blocks(initial.checkpoint), where, cfg).tensors, head)
        source = initial.source(head)
        table = {spec.canonical: spec for spec in family_table(cfg, head.kind, head.outputs)}

        def tensors(spec: ParamSpec, first: int) -> dict[str, Tensor]:
            if initial.folder is not None:
                return to_hf(spec, source(spec), cfg)
            full = source(table[spec.canonical])  # random numbers are those of whole tensors
            return to_hf(spec, full[first : first + spec.shape[0]] if spec.experts else full, cfg)

        return cls(adapters, tensors, head)

    def dtype(self, spec: ParamSpec) -> torch.dtype:
        return torch.float32 if self._trained(spec) else dtype_of(spec, self.adapters[-1].dtype)

    def tensors(self, spec: ParamSpec, first: int = 0) -> dict[str, Tensor]:
        if self._trained(spec):
            return {spec.hf[0]: self.adapters[-1].blocks.region(OUTPUT, (0, 0), spec.shape)}
        tensors = {name: t.to(self.dtype(spec)) for name, t in self.base(spec, first).items()}
        for adapter in self.adapters:
            tensors = {name: adapter.merged(name, t) for name, t in tensors.items()}
        return tensors

    def _trained(self, spec: ParamSpec) -> bool:
        return spec.canonical == OUTPUT and self.head.kind == "score"


def export_adapter(checkpoint: Path, initial: InitialModel, head: Head, out: Path) -> None:
    """Write the newest of the checkpoint's adapters into an existing folder. Raises ConfigError, OSError."""
    if head.kind == "score":
        raise ConfigError("--merge", False, "given for a reward model, whose head was trained beside its adapters")
    run = load_frozen(checkpoint.parent.parent / "config.yaml", foreign=True).model
    cfg = replace(initial.config, lora=run.lora)
    write_adapter(out, cfg, Adapter(initial.adapters[-1][0], cfg).factors, adapter_config(cfg, run.init))
    base = read_checked(checkpoint)["identity"]["lora"]["frozen weights"][0]
    (out / EXTRA_FILE).write_text(json.dumps({BASE: base}, indent=2) + "\n", encoding="utf-8")
