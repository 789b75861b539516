"""Starting point of a model: its shape, its weights and its tokenizer, by `model.init`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aligner.config.freeze import load_frozen
from aligner.config.options import from_plain
from aligner.config.schema import Config
from aligner.config.sections.model.config import (
    MOE_OF_THE_RUN,
    OF_THE_RUN,
    OPTIONAL,
    RUNS,
    SECTIONS,
    ModelConfig,
    for_run,
)
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.data.tokenizer import check_vocab, load_tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.families import refuse_foreign
from aligner.families.hf_config import config_from_hf
from aligner.megatron.checkpoint_files import find_checkpoint, read_checked, view
from aligner.megatron.model import Head
from aligner.megatron.weights import WeightSource, random_source
from aligner.models.fingerprint import digest, folder_view
from aligner.models.folder_check import check_folder
from aligner.models.safetensors_io import open_hf
from aligner.models.slices import HfSource
from aligner.ops.agree import by_rank_0, same_view
from aligner.refit.export import read_extra

SOURCE = "source"  # where `aligner import` puts the small files of the imported folder
# keys of the first versions: a checkpoint's identity has them, and of later ones those that are not the default,
# so that the identity of old checkpoints does not change
_OLD = {
    "rope_scaling": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    "attention": ("window", "global_every", "local_rope_base", "query_scale_dim"),
    "moe": ("num_experts", "top_k", "ffn_hidden_size", "norm_topk_prob"),
}


@dataclass
class InitialModel:
    """Initial state of a model. `config` has its true shape and vocabulary; `checkpoint` is loaded over `source` if
    set."""

    config: ModelConfig
    tokenizer: Any
    folder: Path | None = None  # Hugging Face folder
    checkpoint: Path | None = None  # folder of one model in a sharded checkpoint
    origin: Path | None = None  # folder with the small files of a Hugging Face folder that the model came from
    imported: bool = False  # `checkpoint` has the weights of `origin`
    seed: int = 0
    adapters: tuple[tuple[Path, LoraConfig], ...] = ()  # checkpoints, to be merged into these weights one by one
    content: str = "random"  # or a hash of what the folder holds (docs/explanation/resume.md)

    def source(self, head: Head) -> WeightSource:
        """Return weights for a model with this head; a score head that the folder lacks starts at zero. Collective
        over the world: rank 0 opens all files, others those that they read. Raises CheckpointError if the folder
        holds more or less than its config.json says."""
        random = random_source(self.config, self.seed)
        if self.folder is None:
            return random
        opened = partial(open_hf, self.folder, bool(self.config.mtp.layers))

        def check() -> None:
            check_folder(opened(), self.config, head.kind)

        by_rank_0(check)
        return HfSource(opened, self.config)

    @property
    def weights(self) -> str:
        """An identity of the weights, for adapters that were trained with them."""
        if self.content != "random":
            return self.content
        return f"random, seed {self.seed}, model.init_std {self.config.init_std:g}"

    @property
    def extra(self) -> dict[str, Any]:
        """Extra values that belong to the weights: a reward model's bias and std."""
        folders = [folder.parent for folder, _ in reversed(self.adapters)]
        folders += [self.folder, self.checkpoint and self.checkpoint.parent, self.origin if self.imported else None]
        return next((extra for folder in folders if folder and (extra := read_extra(folder))), {})

    @property
    def has_scores(self) -> bool:
        """Whether the weights have a score head: of a reward model, not of a language model. Collective over the
        world: rank 0 opens the files."""
        if self.adapters:
            return self.adapters[-1][0].name != "policy"
        if (folder := self.folder) is not None:
            return by_rank_0(lambda: "score.weight" in open_hf(folder))
        return self.checkpoint is not None and self.checkpoint.name != "policy"


def resolve(cfg: ModelConfig, init: str, seed: int, key: str = "model.init") -> InitialModel:
    """Resolve shape, weights and tokenizer of `init`: "random", a Hugging Face folder, a run folder or a checkpoint."""
    if init == "random":
        if not cfg.tokenizer:
            raise ConfigError("model.tokenizer", "", "a Hugging Face tokenizer folder when model.init=random")
        return _with_tokenizer(InitialModel(cfg, None, seed=seed), cfg.tokenizer)
    folder, state = by_rank_0(lambda: _find(Path(init).expanduser(), key))
    if state is not None:
        return _from_checkpoint(cfg, folder, state, seed)
    seen = same_view(folder, lambda: folder_view(folder), by_node=True)
    config = for_run(config_from_hf(folder), cfg)
    initial = InitialModel(config, None, folder=folder, origin=folder, seed=seed, content=digest(seen))
    return _with_tokenizer(initial, cfg.tokenizer or str(folder))


def find_shape(cfg: ModelConfig, init: str) -> ModelConfig:
    """Return the shape only, in this process. Raises ConfigError, CheckpointError."""
    folder, state = _find(Path(init).expanduser(), "model.init")
    if state is None:
        return for_run(config_from_hf(folder), cfg)
    return for_run(from_plain(ModelConfig, state["identity"].get("model"), "model"), cfg)


def _find(path: Path, key: str) -> tuple[Path, dict[str, Any] | None]:
    """Return a Hugging Face folder, None, or a checkpoint and its state.json. Raises ConfigError, CheckpointError."""
    if (path / "hf" / "config.json").exists():  # a finished run
        return path / "hf", None
    if (path / "config.json").exists():
        return path, None
    try:
        checkpoint = find_checkpoint(path)
    except CheckpointError:
        expected = "random, a Hugging Face folder (config.json), a run folder or a checkpoint"
        raise ConfigError(key, str(path), expected) from None
    state = read_checked(checkpoint)
    refuse_foreign((state["identity"].get("model") or {}).get("family"), checkpoint / "state.json")
    return checkpoint, state


def _from_checkpoint(cfg: ModelConfig, checkpoint: Path, state: dict[str, Any], seed: int) -> InitialModel:
    """Resolve a run folder without an export, or one of its checkpoints: the shape is in its state.json."""
    seen = same_view(checkpoint, lambda: view(checkpoint), by_node=True)
    identity = state["identity"]
    try:
        config = for_run(from_plain(ModelConfig, identity.get("model"), "model"), cfg)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint / 'state.json'}: identity.{error}") from None
    run_config = load_frozen(checkpoint.parent.parent / "config.yaml", foreign=True)
    if cfg.mtp.layers and "mtp" not in identity["model"]:
        expected = f"0 with {checkpoint}, which has no such layer: start from a Hugging Face folder that has one"
        raise ConfigError("model.mtp.layers", cfg.mtp.layers, expected)
    role = "model" if identity["stage"] == "rm" else "policy"
    if identity.get("lora"):
        return _merged(
            dataclasses.replace(config, tokenizer=cfg.tokenizer), run_config, checkpoint / role, identity["lora"], seen
        )
    origin = checkpoint.parent.parent / SOURCE
    imported = origin.is_dir()
    if not imported:
        origin = _small_files(Path(run_config.model.init).expanduser())
    tokenizer = cfg.tokenizer or run_config.model.tokenizer or str(origin)
    initial = InitialModel(config, None, None, checkpoint / role, origin, imported, seed, content=digest(seen))
    return _with_tokenizer(initial, tokenizer)


def _merged(
    config: ModelConfig, run: Config, folder: Path, adapters: dict[str, Any], seen: dict[str, str]
) -> InitialModel:
    """Resolve the `model.init` of a run with adapters, and add its adapters. Raises CheckpointError if the weights
    there are not those with which the adapters were trained."""
    like = dataclasses.replace(config, tokenizer=config.tokenizer or run.model.tokenizer, init_std=run.model.init_std)
    initial = resolve(like, run.model.init, run.seed)
    if initial.weights != adapters["frozen weights"][0]:
        raise CheckpointError(
            f"checkpoint {folder.parent} holds only adapters, and model.init={run.model.init} no longer has the "
            f"weights they were trained with: {adapters['frozen weights'][0]} then, {initial.weights} now"
        )
    rank, scale = adapters["rank"], adapters["scale"]
    how = {"targets": adapters["targets"], "dora": adapters["dora"]}
    how["quantize_base"] = adapters.get("quantize_base", "none")
    lora = LoraConfig(rank, scale * rank, **how)
    initial.adapters += ((folder, lora),)
    initial.content = digest({"base": initial.weights, "adapters": digest(seen)})
    return initial


def _small_files(init: Path) -> Path:
    """Return the folder of the tokenizer and other small files of a run's `model.init`."""
    run = init.parent.parent if (init / "state.json").exists() else init
    return next((run / name for name in ("hf", SOURCE) if (run / name).is_dir()), run)


def _with_tokenizer(model: InitialModel, folder: str) -> InitialModel:
    announce = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    model.tokenizer = load_tokenizer(folder, announce=announce)
    if model.config.vocab_size == 0:
        model.config = dataclasses.replace(model.config, vocab_size=len(model.tokenizer))
    check_vocab(model.tokenizer, model.config.vocab_size)
    return model


def shape_of(cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields that make two models' weights exchangeable: the identity of a checkpoint."""
    shape = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in (*OF_THE_RUN, "init_std")}
    for name, kind in (SECTIONS | {"rope_scaling": RopeScalingConfig}).items():
        values, usual = shape.pop(name), dataclasses.asdict(kind())
        kept = {key: values[key] for key in values if key in _OLD.get(name, ()) or values[key] != usual[key]}
        if values != usual or name == "rope_scaling":
            shape[name] = {key: value for key, value in kept.items() if f"{name}.{key}" not in RUNS}
    for name, plain in OPTIONAL.items():  # of later versions
        if shape[name] == plain:
            del shape[name]
    if cfg.mtp.layers:
        shape["mtp"] = {"layers": cfg.mtp.layers}
    moe = shape.pop("moe")
    if cfg.moe.num_experts:  # the identity of a dense model is what it was before there were others
        usual = dataclasses.asdict(MoeConfig())
        shape["moe"] = {name: moe[name] for name in moe if name in _OLD["moe"] or moe[name] != usual[name]}
        for name in MOE_OF_THE_RUN:
            shape["moe"].pop(name, None)
    return shape
