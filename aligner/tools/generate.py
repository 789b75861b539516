"""A trained model for the tools, loaded from a run folder or a Hugging Face folder, ready to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aligner.config.on_demand import on_demand
from aligner.config.schema import Config
from aligner.config.sections.engine import EngineConfig
from aligner.data.dialogue import Dialogue
from aligner.data.formats import Tools
from aligner.data.tokenizer import load_tokenizer, sampled_with
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.load import engine_from_folder
from aligner.errors import ConfigError
from aligner.megatron.model import resolve_dtype
from aligner.models.safetensors_io import open_hf
from aligner.ops.seeds import request_seed
from aligner.rollout.requests import Request
from aligner.rollout.sample_generator import SampleGenerator
from aligner.types import Prompt, Sample, SamplingParams


def model_folder(cfg: Config) -> Path:
    """Return the exported model of `run.dir`, or one directly in it, or `model.init` if the run has none yet."""
    run, init = Path(cfg.run.dir), Path(cfg.model.init)
    candidates = [run / "hf", run, init, init / "hf"]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError("run.dir", cfg.run.dir, "a finished run (its `hf` folder), or model.init=<Hugging Face folder>")


def sampling_of(cfg: Config) -> SamplingParams:
    """Return the sampling parameters of evaluation, with the cuts of `sampling`."""
    s, temperature = cfg.sampling, cfg.eval.temperature
    cut = s.top_p, s.top_k, s.min_p
    return SamplingParams(s.max_response_tokens, temperature, *cut, stop=tuple(s.stop), special=s.special_tokens)


def dialogue_of(cfg: Config, tokenizer: Any, tools: Tools) -> Dialogue:
    return Dialogue(tokenizer, tools, cfg.data.template_arguments, cfg.environment.calls)


def is_scorer(folder: Path) -> bool:
    """Return whether the model in the folder is a reward model."""
    return "score.weight" in open_hf(folder)


@dataclass
class Answerer:
    """A model with the native engine, on CUDA if available."""

    engine: NativeEngine
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, config: EngineConfig, dtype: str = "auto", **ranks: Any) -> Answerer:
        """Load a model. `dtype` (model.dtype) counts where engine.dtype=auto. `ranks`: `kind` and `group` of an engine
        on several ranks."""
        if is_scorer(folder):
            raise ConfigError("run.dir", str(folder), "a model that answers; this one is a reward model, which scores")
        tokenizer = load_tokenizer(str(folder))
        if config.draft_model:
            on_demand("engine.draft_model, to check")(config.draft_model, tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine = engine_from_folder(
            folder,
            config,
            device=device,
            dtype=resolve_dtype(dtype if config.dtype == "auto" else config.dtype),
            pad_id=tokenizer.pad_token_id,
            decode=tokenizer.decode,
            **ranks,
        )
        return cls(engine, tokenizer)

    def answer(self, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, seed: int) -> list[Sample]:
        """Return prompts x samples responses, prompt-major. Stop tokens are the tokenizer's."""
        sampling = replace(sampling, **sampled_with(self.tokenizer))
        seeds = [[request_seed(seed, -1, prompt.id, i) for i in range(samples)] for prompt in prompts]
        requests = [Request(i, prompt, seeds[i]) for i, prompt in enumerate(prompts)]
        return SampleGenerator(self.engine, self.tokenizer, sampling, None).samples(requests, sampling)
