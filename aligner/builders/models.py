"""Models in their roles, from a job: policy, reference, reward model, critic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aligner.builders.data import make_ptx
from aligner.builders.job import Job
from aligner.config.derived import minibatch_samples
from aligner.config.on_demand import on_demand
from aligner.config.schema import Config
from aligner.config.sections.model.config import beside, generating
from aligner.config.sections.optim import OptimConfig
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.data.steps import StepEncoder
from aligner.errors import ConfigError
from aligner.megatron.checkpoint import load_model, merge_adapters
from aligner.megatron.ema import Ema
from aligner.megatron.groups import Layout
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import WeightSource
from aligner.models.adapters import described
from aligner.refit.export import EXTRA_FILE
from aligner.roles.critic import Critic
from aligner.roles.model_init import InitialModel, resolve
from aligner.roles.policy import AdapterReference, Policy, Reference
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import AttributeWeight, RewardModel


def make_model(
    job: Job,
    initial: InitialModel,
    head: Head,
    optim: OptimConfig | None,
    steps: int,
    factors: WeightSource | None = None,
    layout: Layout | None = None,
    trunk: ShardedModel | None = None,
) -> ShardedModel:
    """Make a model to train for `steps` optimizer steps with `optim`, else a frozen one, on `layout` or the job's
    layout. Its adapters, if it has some, start with `factors`; its other weights are those of `trunk`, if set."""
    batch, source, layout = job.cfg.batch, trunk or initial.source(head), layout or job.layout
    rows = {"packed": batch.packing, "share": batch.share_prompts, "logits_bytes": batch.logits_bytes}
    rows |= {"seed": job.cfg.seed, "restore": None if trunk else partial(_restore, initial), "factors": factors}
    if optim is not None and initial.config.megatron.get("tp_comm_overlap"):
        make_buffers = on_demand("model.megatron.tp_comm_overlap")
        rows["buffers"] = make_buffers(initial.config, layout, job.dtype, batch.micro_batch_tokens)
    model = ShardedModel(initial.config, layout, head, job.dtype, job.device, source, optim, steps, **rows)
    if model.adapted is not None:
        job.built.frozen.append(initial.weights)
        job.say(described(initial.config, head.kind, head.outputs))
    return model


def _initial_factors(job: Job) -> WeightSource | None:
    """Return the factors of the adapter that training starts from."""
    return on_demand("model.lora.init")(job) if job.cfg.model.lora.init else None


def _restore(initial: InitialModel, model: ShardedModel) -> None:
    own = "model" if model.head.kind == "score" else "policy"
    if initial.checkpoint is not None:
        load_model(model, initial.checkpoint, with_optimizer=False, with_head=initial.checkpoint.name == own)
    for folder, lora in initial.adapters:
        merge_adapters(model, folder, lora, with_head=folder.name == own)


def _temperature(cfg: Config) -> float:
    """Return the temperature of the policy's distribution while it learns."""
    return cfg.sampling.temperature if cfg.stage.its.rollouts else 1.0


def make_policy(job: Job, steps: int, **outputs: bool) -> Policy:
    """Make the policy. `outputs`: those that an update computes (`Policy`)."""
    optim = None if job.cfg.debug.rollout_only else job.cfg.optim
    model = job.built.models["policy"] = make_model(job, job.initial, Head(), optim, steps, _initial_factors(job))
    if optim is not None and job.cfg.ema.decay:
        model.ema = Ema(model, job.cfg.ema.decay)
    ptx = make_ptx(job) if optim is not None and job.cfg.ptx.coef else None
    return Policy(model, job.cfg.batch, _temperature(job.cfg), ptx=ptx, **outputs)


def make_sampler(job: Job) -> Policy:
    """Make a policy that gives its weights to an engine, and never changes."""
    model = job.built.models["policy"] = make_model(job, job.initial, Head(), None, 0)
    return Policy(model, job.cfg.batch, _temperature(job.cfg))


def make_reference(job: Job, policy: Policy | None = None) -> Reference:
    """Make the reference of the initial model: its own copy or, if the `policy` trains only adapters, the policy's
    model without them."""
    if policy is not None and policy.model.adapted is not None:
        return AdapterReference(policy.model, policy.batch, policy.temperature)
    initial = replace(job.initial, config=generating(job.initial.config))
    model = job.built.models["reference"] = make_model(job, initial, Head(), None, 0)
    return Reference(model, job.cfg.batch, _temperature(job.cfg))


def make_preference_models(job: Job) -> tuple[Policy, Reference | None, dict[str, ShardedModel]]:
    """Make the policy, the reference if one runs at each step, and the models that change, for checkpoints."""
    preference = job.cfg.algorithm.preference
    policy = make_policy(job, job.cfg.run.steps, entropy=False, log_squares=preference.wpo)
    models = {"policy": policy.model}
    if preference.reference not in ("model", "adapter"):
        return policy, None, models
    reference = make_reference(job, policy if preference.reference == "adapter" else None)
    if preference.sync_every:
        models["reference"] = reference.model
    return policy, reference, models


def _scorer(job: Job, path: str, key: str) -> InitialModel:
    """Resolve the shape and weights of a reward model; it must share the policy's tokenizer."""
    initial = resolve(beside(job.cfg.model), path, job.cfg.seed, key=key)
    job.built.contents[key] = initial.content
    validate_model(job.cfg, initial.config, scorer=True)
    if job.device.type == "cuda":
        validate_on_gpu(job.cfg, initial.config)
    if initial.tokenizer.get_vocab() != job.tokenizer.get_vocab():
        raise ConfigError(key, path, "a model with the policy's tokenizer: scores are read from the same token ids")
    return initial


def make_reward_model(job: Job) -> RewardModel | ProcessRewardModel | None:
    """Make the model of `reward.model`; None without one."""
    if not job.cfg.reward.model or job.cfg.debug.train_only:  # recordings come with their scores
        return None
    path = job.cfg.reward.model
    initial = _scorer(job, path, "reward.model")
    if not initial.has_scores:
        raise ConfigError("reward.model", path, "a reward model: a run of stage rm, or a folder with score.weight")
    separator = initial.extra.get("separator")
    if not initial.extra:
        job.say(f"reward.model={path}: no {EXTRA_FILE} has the mean of its scores: they are not centred")
    mix = _mix(job, initial)
    outputs = max(1, len(initial.extra.get("attributes") or ()))
    model = job.built.models["reward"] = make_model(job, initial, Head("score", outputs), None, 0)
    if separator:
        return ProcessRewardModel(
            model, job.cfg.batch, StepEncoder(job.tokenizer, separator), job.cfg.reward.model_steps
        )
    return RewardModel(model, job.cfg.batch, *_centring(job, initial), mix=mix)


def _mix(job: Job, initial: InitialModel) -> tuple[AttributeWeight, ...]:
    """Return the outputs and weights by reward.model_attributes, of a reward model of several attributes."""
    weights, extra, key = job.cfg.reward.model_attributes, initial.extra, "reward.model_attributes"
    names = list(extra.get("attributes") or ())
    for name in weights:
        if name not in names:
            known = ", ".join(names) or "none: it was trained on pairs or steps"
            raise ConfigError(key, name, f"attributes of reward.model, which has {known}")
    if weights and "biases" not in extra:
        raise ConfigError(key, dict(weights), "a reward model that stores the mean of each attribute: train it anew")
    scales = extra["stds"] if weights and job.cfg.reward.model_standardize else [1.0] * len(names)
    places = {name: names.index(name) for name in weights}
    return tuple(AttributeWeight(k, weights[name], extra["biases"][k], scales[k]) for name, k in places.items())


def _centring(job: Job, initial: InitialModel) -> tuple[float, float]:
    """Return (bias, scale) of a reward model's scores."""
    extra = initial.extra
    return extra.get("bias", 0.0), extra.get("std", 1.0) if job.cfg.reward.model_standardize else 1.0


def make_scorer(job: Job, outputs: int) -> RewardModel:
    """Make the model of `model.init` with a head of `outputs` scores, to be trained."""
    how = job.cfg.optim, job.cfg.run.steps, _initial_factors(job)
    model = make_model(job, job.initial, Head("score", outputs), *how)
    job.built.models["policy"] = model
    return RewardModel(model, job.cfg.batch)


def make_step_scorer(job: Job) -> ProcessRewardModel:
    """Make the same with one score for each step."""
    model = make_scorer(job, 1).model
    return ProcessRewardModel(model, job.cfg.batch, StepEncoder(job.tokenizer, job.cfg.algorithm.reward_loss.separator))


def make_critic(job: Job, steps: int, policy: Policy) -> Critic:
    """Make the critic from `critic.init`, by default the reward model, whose centred, scaled scores it then uses. Or
    put it on the frozen weights of the `policy`."""
    if job.cfg.critic.trunk == "policy":
        how = job.cfg.critic.optim, steps
        model = job.built.models["critic"] = make_model(job, job.initial, Head("score"), *how, trunk=policy.model)
        return Critic(model, job.cfg.batch)
    path = job.cfg.critic.init or job.cfg.reward.model
    initial = _scorer(job, path, "critic.init" if job.cfg.critic.init else "reward.model")
    names = initial.extra.get("attributes") or ()
    if len(names) > 1:
        expected = "a language model, or a reward model of one score, to start the critic from"
        raise ConfigError("critic.init", job.cfg.critic.init, expected, f"{path} scores {', '.join(names)}.")
    model = job.built.models["critic"] = make_model(job, initial, Head("score"), job.cfg.critic.optim, steps)
    bias, scale = _centring(job, initial) if path == job.cfg.reward.model else (0.0, 1.0)
    return Critic(model, job.cfg.batch, bias, scale)


def optimizer_steps(job: Job) -> int:
    """Return the optimizer steps of the whole run, in a stage with rollouts."""
    samples = job.cfg.batch.prompts * job.cfg.batch.group
    return job.cfg.run.steps * job.cfg.batch.epochs * (samples // minibatch_samples(job.cfg))
