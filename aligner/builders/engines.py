"""From a frozen config to what generates: engine, refit, proof, evaluation; and ranks that only generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aligner.builders.data import make_prompts, make_sampling
from aligner.builders.environments import find_tools, make_turns
from aligner.builders.job import Job
from aligner.config.derived import evaluation_functions
from aligner.config.quantization import describe, quantized
from aligner.config.sections.model.config import ModelConfig
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.engines.base import RolloutEngine
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.remote import RemoteEngine
from aligner.engines.quantized import QuantizedEngine, has_modelopt, make_quantizer
from aligner.engines.recorded import FOLDER as ANSWERS
from aligner.engines.recorded import RecordedEngine, RecordingEngine
from aligner.errors import ConfigError, EngineError
from aligner.loading import on_demand
from aligner.megatron.groups import (
    neighbours,
)
from aligner.megatron.model import resolve_dtype
from aligner.megatron.train import ShardedModel
from aligner.refit.exchange import Exchange
from aligner.refit.factors import FactorExchange
from aligner.refit.plan import EngineGrid, TrainerGrid
from aligner.refit.serve import Server
from aligner.refit.transfer import Refit, planned
from aligner.refit.verify import POWER, Verifier
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.environment import EnvironmentReward
from aligner.rewards.functions import load_function
from aligner.roles.policy import Policy
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.evaluate import Evaluator
from aligner.rollout.player import Player
from aligner.rollout.references import check_rows
from aligner.rollout.sharing import raised_together
from aligner.run.phases import PhaseMemory
from aligner.types import TrainBatch

if TYPE_CHECKING:
    from aligner.engines.child.engine import ChildEngine
    from aligner.engines.vllm.placed import PlacedVllmEngine

SENTINEL_PROMPTS, SENTINEL_TOKENS = 8, 64
SENTINEL_DECODED = 16  # tokens that engines in a process of their own generate after each of these prompts


def _engine(job: Job, model: ModelConfig) -> RolloutEngine:
    engine = _bare_engine(job, model)
    if quantized(job.cfg):
        quantize, by = make_quantizer(job.cfg.engine.quantization, has_modelopt())
        job.say(describe(job.cfg, by))
        engine = QuantizedEngine(engine, quantize, hashes=job.cfg.refit.verify == "checksum")
    if job.cfg.debug.record_answers:
        engine = RecordingEngine(engine, Path(job.cfg.run.dir) / ANSWERS, job.env.rank)
    job.engine = engine
    return engine


def _engine_dtype(job: Job) -> torch.dtype:
    name = job.cfg.engine.dtype
    return job.dtype if name == "auto" else resolve_dtype(name)


def _bare_engine(job: Job, model: ModelConfig) -> RolloutEngine:
    dtype = _engine_dtype(job)
    if job.bridge is not None:
        job.bridge.on_signal = job.boundary.signals.note
        routing = model if job.cfg.mismatch.replay_routing else None
        return RemoteEngine(job.bridge, job.cfg.engine.tensor_parallel, dtype, routing)
    if job.cfg.engine.child is not None:
        return _child_engine(job, model, dtype, on_demand(f"engine.name={job.cfg.engine.name}"))
    if job.cfg.engine.can.replays:
        return RecordedEngine(model, job.cfg.engine.answers, dtype=dtype)
    return _policy_engine(job, model)


def native_engine(job: Job, model: ModelConfig, tokenizer: Any, reports_routing: bool = False) -> FleetEngine:
    """One without weights. Collective over the ranks that will call it together."""
    return FleetEngine(
        model,
        job.cfg.engine,
        device=job.device,
        dtype=_engine_dtype(job),
        pad_id=tokenizer.pad_token_id,
        decode=tokenizer.decode,
        group=neighbours(job.cfg.engine.tensor_parallel),
        reports_routing=reports_routing,
    )


def _policy_engine(job: Job, model: ModelConfig) -> FleetEngine:
    engine = native_engine(job, model, job.tokenizer, job.cfg.mismatch.replay_routing)
    engine.steal = not job.cfg.run.deterministic
    return engine


def serve(job: Job) -> int:
    """On a rank that only generates: do what the trainer's ranks order, to their end; returns the exit code."""
    cfg, bridge, model = job.cfg, job.bridge, job.initial.config
    assert bridge is not None
    bridge.signal = lambda: job.boundary.signals.received
    dtype = _engine_dtype(job)
    job.engine = engine = _served_engine(job, model, dtype)
    p = cfg.parallel
    data = bridge.trainers // p.model_size
    trainer = TrainerGrid(model.num_layers, p.tensor, p.pipeline, p.context, data, p.expert)

    def plan() -> Exchange | FactorExchange:
        engines = EngineGrid(bridge.engines, cfg.engine.tensor_parallel)
        return planned(trainer, engines, model, (job.dtype, dtype), job.device, cfg.refit, bridge)

    memory = PhaseMemory(cfg.memory, job.device, {}, engine, cfg.engine.cache_bytes)
    memory.rank = bridge.rank
    job.timers.on_phase = job.watchdog.phase
    check_memory = lambda: memory.check(memory.take(alone=True))  # noqa: E731
    play = None
    if cfg.environment.on:
        find_tools(job)
        limit = cfg.sampling.max_response_tokens
        play = make_turns(job, engine, make_sampling(job, cfg.sampling.temperature, limit)).serve
    well = Server(bridge, engine, plan, cfg.refit, job.timers, memory.phase, check_memory, play)()
    bridge.leave(well)
    return 0 if well else 1


def _served_engine(job: Job, model: ModelConfig, dtype: torch.dtype) -> FleetEngine | PlacedVllmEngine:
    if job.cfg.engine.child is not None:
        return _child_engine(job, model, dtype, on_demand(f"engine.name={job.cfg.engine.name} on ranks"))
    return _policy_engine(job, model)


def _child_engine[E: ChildEngine](job: Job, model: ModelConfig, dtype: torch.dtype, kind: type[E]) -> E:
    cfg, tokenizer = job.cfg, job.tokenizer
    response = max(cfg.sampling.max_response_tokens, cfg.eval.max_response_tokens)
    with raised_together(EngineError):
        engine = kind(
            model,
            cfg.engine,
            device=job.device,
            dtype=dtype,
            pad_id=tokenizer.pad_token_id,
            max_seq_len=max(cfg.data.max_prompt_tokens, SENTINEL_TOKENS) + response + 1,
            bucket_bytes=cfg.refit.bucket_bytes,
            checksums=cfg.refit.verify == "checksum",
            decode=tokenizer.decode,
            group=neighbours(cfg.engine.tensor_parallel),
        )
    if not engine.request_seeds:
        job.say(f"TensorRT-LLM {engine.version}: samples do not follow their seeds (docs/trtllm.md)")
        if cfg.run.deterministic:
            expected = f"false with TensorRT-LLM {engine.version}, whose sampler ignores the seeds of requests"
            raise ConfigError("run.deterministic", True, expected, "1.4 and engine.name=native follow them.")
    return engine


def make_refit(job: Job, model: ShardedModel) -> Refit:
    return Refit(model, _engine(job, model.cfg), job.cfg.refit, skip=job.cfg.debug.skip_refit)


def make_verifier(job: Job, refit: Refit, policy: Policy, prompts: PromptDataset | PromptMixture) -> Verifier:
    """Sentinel rows: the first prompts of the training set; logprobs at temperature 1 on both sides. What is generated
    after them is no longer than responses are: there is room for it."""
    first = [prompts[i].tokens[:SENTINEL_TOKENS] for i in range(min(SENTINEL_PROMPTS, len(prompts)))]
    # a prompt of one token has no logprob to compare
    rows = [torch.tensor(row if len(row) > 1 else (*row, job.tokenizer.eos_token_id)) for row in first]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=job.tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    plain = Policy(policy.model, policy.batch, temperature=1.0)
    power = POWER * (3 if quantized(job.cfg) else 1)  # its noise is that of the rounding, and not of zero mean
    trainer = lambda t, n: plain.logprobs(TrainBatch(t, n, torch.zeros(len(n), 0)))  # noqa: E731
    decoded = min(SENTINEL_DECODED, job.cfg.sampling.max_response_tokens) if job.cfg.engine.child else 0
    return Verifier(refit, tokens, lengths, trainer, power=power, decoded=decoded)


def make_answer_evaluator(job: Job, model: ShardedModel, refit: Refit | None) -> Evaluator | None:
    """Of a stage that learns from answers, with a `refit` of its own or none yet."""
    return make_evaluator(job, refit or make_refit(job, model))


def make_evaluator(
    job: Job,
    refit: Refit,
    reward_model: RewardModel | ProcessRewardModel | None = None,
    player: Player | None = None,
) -> Evaluator | None:
    functions = evaluation_functions(job.cfg)
    judges: list[tuple[Any, float]] = [(load_function(f, i), f.weight) for i, f in enumerate(functions)]
    if job.environment_scores and job.cfg.data.eval and job.cfg.eval.generate:
        judges.append((EnvironmentReward(), job.cfg.environment.weight))
    if not judges:
        return None
    rewards = RewardPipeline(judges, job.cfg.reward)
    prompts = make_prompts(job, job.cfg.data.eval, "data.eval", job.cfg.data)
    check_rows(rewards, prompts, min(job.cfg.eval.prompts or len(prompts), len(prompts)), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    limit = job.cfg.eval.max_response_tokens or job.cfg.sampling.max_response_tokens
    sampling = make_sampling(job, job.cfg.eval.temperature, limit, plain=True)
    return Evaluator(
        player or Player(refit.engine, job.tokenizer, sampling, job.layout.peers),
        refit,
        prompts,
        rewards,
        sampling,
        job.cfg.eval,
        job.layout,
        job.cfg.seed,
        reward_model,
        job.timers,
    )
