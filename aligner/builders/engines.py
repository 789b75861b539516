"""Engine, refit, its verification and evaluation, from a job; and ranks that only generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aligner.builders.data import make_prompts, make_sampling
from aligner.builders.job import POLICY, Job
from aligner.config.derived import evaluation_functions, evaluation_tasks
from aligner.config.engines import ENGINES
from aligner.config.on_demand import imported, on_demand
from aligner.config.quantization import describe, emulated, of_package, quantized
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig, generating
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.engines.base import RolloutEngine
from aligner.errors import EngineError
from aligner.megatron.groups import neighbours
from aligner.megatron.model import resolve_dtype
from aligner.megatron.train import ShardedModel
from aligner.ops.agree import raised_together
from aligner.refit.transfer import Refit
from aligner.refit.verify import POWER, Verifier
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.environment import EnvironmentReward
from aligner.rewards.functions import load_function
from aligner.roles.policy import Policy
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.evaluate import Evaluator
from aligner.rollout.references import check_rows
from aligner.rollout.sample_generator import SampleGenerator
from aligner.run.loop import Evaluate
from aligner.types import TrainBatch
from aligner.user_code import is_path

if TYPE_CHECKING:
    from aligner.engines.child.engine import ChildEngine
    from aligner.engines.native.fleet import FleetEngine

SENTINEL_PROMPTS, SENTINEL_TOKENS = 8, 64
SENTINEL_DECODED = 16  # tokens that engines in a child process generate after each of these prompts


def _engine(job: Job, model: ModelConfig) -> RolloutEngine:
    engine = _bare_engine(job, model)
    if of_package(job.cfg):
        job.say(describe(job.cfg, ""))
    if emulated(job.cfg):
        hashes = job.cfg.refit.verify == "checksum"
        engine, by = on_demand("engine.quantization")(engine, job.cfg.engine.quantization, hashes)
        job.say(describe(job.cfg, by))
    if job.cfg.debug.record_answers:
        engine = on_demand("debug.record_answers")(engine, Path(job.cfg.run.dir), job.env.rank)
    job.built.engines[POLICY] = engine
    return engine


def engine_dtype(job: Job) -> torch.dtype:
    name = job.cfg.engine.dtype
    return job.dtype if name == "auto" else resolve_dtype(name)


def _bare_engine(job: Job, model: ModelConfig) -> RolloutEngine:
    dtype, engine = engine_dtype(job), job.cfg.engine
    if job.bridge is not None:
        job.bridge.on_signal = job.boundary.signals.note
        routing = model if job.cfg.mismatch.replay_routing else None
        return on_demand("engine.ranks, to order")(job.bridge, engine.tensor_parallel, dtype, routing)
    if is_path(engine.name):
        return on_demand("engine.name")(job, model, engine_dtype(job))
    if engine.child is not None:
        return child_engine(job, model, imported(ENGINES[engine.name].made_by))
    if engine.can.replays:
        return imported(ENGINES[engine.name].made_by)(model, engine.answers, dtype=dtype)
    return policy_engine(job, model)


def native_engine(
    job: Job, model: ModelConfig, tokenizer: Any, reports_routing: bool = False, draft_model: str = ""
) -> FleetEngine:
    """Make a native engine without weights. Collective over the ranks that will call it together."""
    return imported(ENGINES["native"].made_by)(
        model,
        replace(job.cfg.engine, draft_model=draft_model),
        device=job.device,
        dtype=engine_dtype(job),
        pad_id=tokenizer.pad_token_id,
        decode=tokenizer.decode,
        group=neighbours(job.cfg.engine.tensor_parallel),
        reports_routing=reports_routing,
    )


def policy_engine(job: Job, model: ModelConfig) -> FleetEngine:
    drafter = job.cfg.engine.draft_model
    engine = native_engine(job, model, job.tokenizer, job.cfg.mismatch.replay_routing, drafter)
    engine.steal = not job.cfg.run.deterministic
    return engine


def child_tokens(cfg: Config) -> int:
    """Return the tokens of the longest row of an engine in a child process."""
    response = max(cfg.sampling.max_response_tokens, cfg.eval.max_response_tokens)
    return max(cfg.data.max_prompt_tokens, SENTINEL_TOKENS) + response + 1


def child_engine[E: ChildEngine](job: Job, model: ModelConfig, kind: type[E]) -> E:
    cfg, tokenizer = job.cfg, job.tokenizer
    with raised_together(EngineError):
        engine = kind(
            model,
            cfg.engine,
            device=job.device,
            dtype=engine_dtype(job),
            pad_id=tokenizer.pad_token_id,
            max_seq_len=child_tokens(cfg),
            bucket_bytes=cfg.refit.bucket_bytes,
            checksums=cfg.refit.verify == "checksum",
            decode=tokenizer.decode,
            group=neighbours(cfg.engine.tensor_parallel),
            reports_routing=cfg.mismatch.replay_routing,
        )
    return engine


def make_refit(job: Job, model: ShardedModel) -> Refit:
    shape = generating(model.cfg, job.cfg.engine.reads_ahead)
    return Refit(model, _engine(job, shape), job.cfg.refit, skip=job.cfg.debug.skip_refit, shape=shape)


def make_verifier(job: Job, refit: Refit, policy: Policy, prompts: PromptDataset | PromptMixture) -> Verifier:
    """Make the verifier with sentinel rows: the first prompts of the training set; logprobs at temperature 1 on both
    sides. The tokens generated after them are no longer than responses, so there is room for them."""
    first = [prompts[i].tokens[:SENTINEL_TOKENS] for i in range(min(SENTINEL_PROMPTS, len(prompts)))]
    # a prompt of one token has no logprob to compare
    rows = [torch.tensor(row if len(row) > 1 else (*row, job.tokenizer.eos_token_id)) for row in first]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=job.tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    plain = Policy(policy.model, policy.batch, temperature=1.0)
    power = POWER * (3 if quantized(job.cfg) else 1)  # its noise is the rounding's, whose mean is not zero
    trainer = lambda t, n: plain.logprobs(TrainBatch(t, n, torch.zeros(len(n), 0)))  # noqa: E731
    decoded = min(SENTINEL_DECODED, job.cfg.sampling.max_response_tokens) if job.cfg.engine.child else 0
    return Verifier(refit, tokens, lengths, trainer, power=power, decoded=decoded)


def make_answer_evaluators(job: Job, model: ShardedModel, refit: Refit | None) -> tuple[Evaluate | None, ...]:
    """Make the evaluators of a stage that learns from answers, which ask its engine. It has its own `refit` or none
    yet."""
    refit = refit or make_refit(job, model)
    return make_evaluator(job, refit), make_suite(job, refit)


def make_suite(job: Job, refit: Refit) -> Evaluate | None:
    return on_demand("eval.tasks")(job, refit) if evaluation_tasks(job.cfg) else None


def make_evaluator(
    job: Job,
    refit: Refit,
    reward_model: RewardModel | ProcessRewardModel | None = None,
    generator: SampleGenerator | None = None,
) -> Evaluator | None:
    functions = evaluation_functions(job.cfg)
    judges: list[tuple[Any, float]] = [(load_function(f, i), f.weight) for i, f in enumerate(functions)]
    if job.tooling and job.tooling.scores and job.cfg.data.eval and job.cfg.eval.generate:
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
        generator or SampleGenerator(refit.engine, job.tokenizer, sampling, job.layout.peers),
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
