"""A policy and an engine of one shape on one device, which `benchmarks/gpu.py` times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from aligner.algorithms.losses import policy_loss
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.graphs import CudaRecorder, DecodeGraphs
from aligner.families.rows import ParamSpec
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head, check_kernels
from aligner.megatron.train import ShardedModel
from aligner.refit.transfer import Refit
from aligner.roles.policy import Policy
from aligner.types import Generations, PolicyTargets, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from benchmarks.gpu import Machine, Size


class Bench:
    """Policy and engine, built like a run's, with random weights."""

    def __init__(
        self,
        cfg: ModelConfig,
        size: Size,
        micro_tokens: int,
        machine: Machine,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.cfg = replace(cfg, max_position=max(4096, size.row))
        self.size, self.machine, device = size, machine, machine.device
        self.batch = BatchConfig(
            prompts=size.prompts,
            group=size.group,
            micro_batch_tokens=micro_tokens,
            logprob_tokens=max(micro_tokens, size.row),
            logits_bytes=8 << 30,
            share_prompts=False,  # every token is computed, so that operations a token mean what they say: see `rows`
        )
        generator = torch.Generator(device).manual_seed(0)

        def source(spec: ParamSpec) -> torch.Tensor:
            if spec.canonical.endswith("norm.weight"):
                return torch.ones(spec.shape, device=device)
            return 0.02 * torch.randn(spec.shape, device=device, generator=generator)

        layout = build_layout(ParallelConfig())
        model = ShardedModel(self.cfg, layout, Head(), dtype, device, source, OptimConfig(lr=1e-6), 100)
        self.policy = Policy(model, self.batch, entropy=False)
        config = EngineConfig(kv_cache_bytes=int(size.kv_bytes), max_batch=max(size.batches), cuda_graphs=False)
        self.engine = NativeEngine(self.cfg, config, device=device, dtype=dtype, pad_id=0)
        self.refit = partial(Refit(model, self.engine, RefitConfig()), again=True)
        g = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(1, cfg.vocab_size, (size.prompts, size.prompt_tokens), generator=g)

    def use_graphs(self, wanted: bool) -> None:
        self.engine.graphs = DecodeGraphs(self.engine.model, CudaRecorder()) if wanted else None

    def use_varlen(self, wanted: bool) -> None:
        """Use attention by rows of any length, or not. Raises ConfigError if the device cannot."""
        model = self.policy.model
        cfg = replace(model.cfg, varlen_attention=wanted)
        check_kernels(cfg, model.dtype, model.device)
        model.cfg = cfg

    def generate(self, rows: int, limit: int) -> Generations:
        """Generate `rows` samples of equal length: no token stops a response."""
        group = max(1, rows // self.size.prompts)
        prompts = self.prompts[: rows // group].tolist()
        seeds = [[1000 * i + j for j in range(group)] for i in range(len(prompts))]
        return self.engine.generate(prompts, seeds, SamplingParams(limit))

    def rows(self, generations: Generations, every: bool = False) -> TrainBatch:
        """Return rows that are read like a run's, only the responses; with `every`, prompts too, so that no token's
        logits or last layer are left out."""
        group = len(generations.tokens) // self.size.prompts
        tokens = torch.cat([self.prompts.repeat_interleave(group, 0), generations.tokens], 1)
        mask = torch.zeros(tokens.shape)
        mask[:, 1 if every else self.size.prompt_tokens :] = 1
        advantages = torch.randn(len(tokens), 1, generator=torch.Generator().manual_seed(2)) * mask
        old = torch.zeros(tokens.shape)
        old[:, self.size.prompt_tokens :] = generations.logprobs
        return TrainBatch(tokens, torch.full((len(tokens),), tokens.shape[1]), mask, [PolicyTargets(advantages, old)])

    def update(self, rows: TrainBatch) -> None:
        loss = policy_loss(rows, AlgorithmConfig(), 0.0, self.size.response_tokens, self.policy.model.layout.pgs.dp)
        self.policy.update(rows, loss)

    def close(self) -> None:
        self.engine.close()
