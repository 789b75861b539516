"""Low-rank adapters as rows of a table: the matrices that have them, and the layout of their factors over ranks.

One of Megatron's matrices may be several of Hugging Face's (queries, keys and values; gate and up). Each of these is a
target with its own factors, A [rank, in] and B [out, rank], and with DoRA a magnitude [out]. Factors are in the order
of Hugging Face's rows. They are ordinary tensors: import, export and checkpoints read their rows like the family's.
Names in files are PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR
from aligner.errors import ConfigError
from aligner.families.matrices import Split, is_matrix, outs_of, rows_of_group, sizes_of, split_of
from aligner.families.rows import ParamSpec
from aligner.families.table import family_table
from aligner.models.shards import HfTensor

LORA_A, LORA_B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class Target:
    """One of the matrices that form `AdaptedMatrix.base`. Factors of experts have one entry for each expert."""

    name: str  # the last part of its name in Hugging Face's files, as in `model.lora.targets`
    index: int  # in the matrix, or in each expert's matrix
    modules: tuple[str, ...]  # its name in Hugging Face's files without .weight; for experts one name each
    a: ParamSpec
    b: ParamSpec
    magnitude: ParamSpec | None


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix of Megatron's model with adapters."""

    base: ParamSpec
    split: Split
    targets: tuple[Target, ...]

    @property
    def module(self) -> str:
        """Canonical name of the module that has the matrix."""
        return self.base.canonical.rsplit(".", 1)[0]

    @property
    def holder(self) -> str:
        """Canonical name of the module inside `module` that has the factors."""
        return _holder(self.base)

    def rows(self, cfg: ModelConfig, tensor: int) -> tuple[int, list[int]]:
        """Return (groups, rows of each target in a group) of a tensor rank's rows."""
        spec, share = self.base, tensor if self.split == "out" else 1
        if spec.transform in ("qkv", "linear_in"):
            return spec.units // share, rows_of_group(spec, cfg)
        return 1, [out // share for out in outs_of(spec, cfg)]


def sites(cfg: ModelConfig) -> list[AdaptedMatrix]:
    """Return every matrix with adapters, in the order of the family's table. Raises ConfigError for a target that no
    matrix of the layers has."""
    adaptable = list(_sites(cfg))
    names = {target.name for site in adaptable for target in site.targets}
    wanted = names if cfg.lora.targets == [ALL_LINEAR] else set(cfg.lora.targets)
    if unknown := sorted(wanted - names):
        expected = f"{ALL_LINEAR}, or some of {', '.join(dict.fromkeys(t.name for s in adaptable for t in s.targets))}"
        hint = f"No matrix of the layers of this {cfg.family} model is called {', '.join(unknown)}."
        if "lm_head" in unknown:
            hint += " The output layer is never adapted" + (": it is the embedding." if cfg.tie_embeddings else ".")
        raise ConfigError("model.lora.targets", list(cfg.lora.targets), expected, hint)
    chosen = (replace(site, targets=tuple(t for t in site.targets if t.name in wanted)) for site in adaptable)
    return [site for site in chosen if site.targets]


def held_sites(cfg: ModelConfig) -> list[AdaptedMatrix]:
    """Return the matrices that `model.lora.quantize_base` stores in fewer bits, adapted or not.

    These are all matrices of the layers, without routers and those that tensor ranks hold whole.
    """
    return [site for site in _sites(cfg) if site.split != "none"]


def adapter_table(cfg: ModelConfig) -> list[ParamSpec]:
    """Return every factor of the model, as `family_table` returns its weights; empty without adapters."""
    if not cfg.lora.rank:
        return []
    return [
        spec
        for site in sites(cfg)
        for target in site.targets
        for spec in (target.a, target.b, target.magnitude)
        if spec is not None
    ]


def factor_tensors(cfg: ModelConfig) -> tuple[HfTensor, ...]:
    """Return `adapter_table` by the names of files, as `hf_tensors` returns the weights."""
    return tuple(
        HfTensor(name, spec.shape[1:] if spec.experts else spec.shape, spec, index)
        for spec in adapter_table(cfg)
        for index, name in enumerate(spec.hf)
    )


def target_names(cfg: ModelConfig) -> list[str]:
    """Return the name of each kind of adapted matrix once."""
    return list(dict.fromkeys(target.name for site in sites(cfg) for target in site.targets))


def described(cfg: ModelConfig, head: str, outputs: int) -> str:
    """Return a line about the adapters for the start of a run."""
    tables = adapter_table(cfg), family_table(cfg, head, outputs)
    trained, total = (sum(prod(spec.shape) for spec in table) for table in tables)
    trained += outputs * cfg.hidden_size if head == "score" else 0
    kind = "dora" if cfg.lora.dora else "lora"
    return (
        f"model.lora: {kind} of rank {cfg.lora.rank}, scale {cfg.lora.scale:g}, on {', '.join(target_names(cfg))}: "
        f"{trained:,} parameters are trained, {trained / total:.2%} of the model's {total:,}"
    )


def _sites(cfg: ModelConfig) -> Iterator[AdaptedMatrix]:
    for spec in filter(is_matrix, family_table(cfg)):
        outs = outs_of(spec, cfg)
        targets = (_target(spec, i, out, spec.hf[i :: len(outs)], cfg) for i, out in enumerate(outs))
        yield AdaptedMatrix(spec, split_of(spec), tuple(targets))


def _holder(spec: ParamSpec) -> str:
    return f"{spec.canonical}_adapters" if spec.experts else f"{spec.canonical.removesuffix('.weight')}.adapters"


def _target(spec: ParamSpec, index: int, out: int, hf: tuple[str, ...], cfg: ModelConfig) -> Target:
    modules = tuple(name.removesuffix(".weight") for name in hf)
    name = modules[0].rsplit(".", 1)[-1]
    (_, inner), split = sizes_of(spec), split_of(spec)
    rank, experts = cfg.lora.rank, spec.shape[:1] if spec.experts else ()

    def factor(kind: str, file: str, cut: Split, *shape: int) -> ParamSpec:
        axis = len(experts) + (cut == "in") if cut == split else None
        return ParamSpec(
            f"{_holder(spec)}.{name}.{kind}",
            tuple(f"{m}.{file}" for m in modules),
            "experts" if experts else "copy",
            axis,
            (*experts, *shape),
            0 if axis is None else spec.units,
            experts=spec.experts,
            float32=kind == "magnitude",
        )

    a, b = factor("a", LORA_A, "in", rank, inner), factor("b", LORA_B, "out", out, rank)
    magnitude = factor("magnitude", MAGNITUDE, "out", out) if cfg.lora.dora else None
    return Target(name, index, modules, a, b, magnitude)
