"""Values that follow from a config: numbers of ranks and samples, evaluations, and the needed forward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.checks import AUTO
from aligner.config.sections.mismatch import WEIGHING
from aligner.config.sections.rewards import RewardFunctionConfig
from aligner.config.stages import STAGES

if TYPE_CHECKING:
    from aligner.config.schema import Config


def undecided(cfg: Config) -> bool:
    """Return whether a number that the run needs is still `auto`."""
    cache = cfg.engine.kv_cache_bytes == AUTO and generates(cfg)
    return cache or cfg.batch.sizes_itself or cfg.batch.logprob_tokens == AUTO


def generates(cfg: Config) -> bool:
    """Return whether the run has an engine."""
    rollouts = STAGES[cfg.stage.name].rollouts and not cfg.debug.train_only
    return rollouts or cfg.algorithm.distill.on_policy > 0 or evaluates(cfg)


def learns_from_rollouts(cfg: Config) -> bool:
    stage = STAGES[cfg.stage.name]
    return stage.rollouts and stage.trains


def counts_outcomes(cfg: Config) -> bool:
    """Return whether passes and rewards are counted by source or row."""
    return learns_from_rollouts(cfg) and bool(cfg.data.sources or cfg.curriculum.skip_epochs)


def data_parallel(cfg: Config, world_size: int) -> int:
    return (world_size - cfg.engine.ranks) // cfg.parallel.model_size


def node_purposes(trainers: int, engines: int, per_node: int, engine_nodes: int = 0) -> str:
    """Describe the purposes of the nodes of so many ranks. The `engines` are the last ranks, or have nodes of their
    own. Returns "" without any, and on one node."""
    train, rest = divmod(trainers, per_node)
    both = bool(rest) and not engine_nodes
    only = engine_nodes or -(-(trainers + engines) // per_node) - train - both
    if not engines or train + both + only == 1:
        return ""
    counts = {"training": train, "engines": only, "both": int(both)}
    phrases = [f"{number} for {what}" for what, number in counts.items() if number]
    reason = f" (engine.ranks={engines} is no multiple of {per_node})" if both else ""
    return f"nodes: {', '.join(phrases)}{reason}"


def minibatch_samples(cfg: Config) -> int:
    """Return the samples of one optimizer step over all ranks; batch.minibatch_samples=0 means the whole rollout."""
    return cfg.batch.minibatch_samples or cfg.batch.prompts * cfg.batch.group


def response_limit(cfg: Config) -> int:
    """Return the most tokens after a prompt; of a trajectory all of them, generated or not."""
    return cfg.environment.max_tokens if cfg.environment.on else cfg.sampling.max_response_tokens


def response_limits(cfg: Config) -> dict[str, int]:
    """Return the limits of responses, by key: first the limit of all their tokens."""
    one, env = {"sampling.max_response_tokens": cfg.sampling.max_response_tokens}, cfg.environment
    return {"environment.max_tokens": env.max_tokens, "environment.max_turns": env.max_turns} | one if env.on else one


def evaluation_functions(cfg: Config) -> list[RewardFunctionConfig]:
    """Return the functions that score generated answers to the rows of data.eval; [] if none are generated."""
    wanted = cfg.eval.generate and cfg.data.eval and STAGES[cfg.stage.name].answers
    return (cfg.eval.functions or cfg.reward.functions) if wanted else []


def evaluates(cfg: Config) -> bool:
    """Return whether the run's engine answers in its evaluations."""
    return bool(evaluation_functions(cfg) or evaluation_tasks(cfg))


def evaluation_tasks(cfg: Config) -> list[str]:
    return cfg.eval.tasks if STAGES[cfg.stage.name].answers else []


def recorded_steps(cfg: Config) -> int:
    """Return for how many of the last steps rollouts are recorded as files."""
    return cfg.debug.record or (cfg.run.steps if cfg.debug.rollout_only else 0)


def batch_arithmetic(cfg: Config, world_size: int) -> str:
    """Describe how samples become minibatches and micro-batches, with this config's numbers."""
    dp, b, stage = data_parallel(cfg, world_size), cfg.batch, STAGES[cfg.stage.name]
    if not stage.rollouts:
        return f"{b.sequences} {stage.unit} = {_micro_batches(cfg, b.sequences, dp)}"
    samples, minibatch = b.prompts * b.group, minibatch_samples(cfg)
    if not stage.trains:
        return f"{b.prompts} prompts x {b.group} group = {samples} samples"
    if stage.pairs:
        return f"{b.prompts} prompts x {b.group} group, {b.prompts} pairs = {_micro_batches(cfg, b.prompts, dp)}"
    text = f"{b.prompts} prompts x {b.group} group = {samples} samples"
    text += f" = {samples // minibatch} minibatch{'es' * (samples > minibatch)} x {minibatch} minibatch_samples"
    text += f" ({b.epochs} epochs)" if b.epochs > 1 else ""
    return f"{text}\n{minibatch} minibatch_samples = {_micro_batches(cfg, minibatch, dp)}"


def _micro_batches(cfg: Config, total: int, dp: int) -> str:
    ranks = f"x {dp} data-parallel rank{'s' * (dp > 1)}"
    if cfg.batch.micro_batch_tokens:
        return f"micro-batches of at most {cfg.batch.micro_batch_tokens} micro_batch_tokens {ranks}"
    if cfg.batch.sizes_itself:
        return f"micro-batches of a size that fits the memory (batch.micro_batch_samples=auto) {ranks}"
    micro = min(cfg.batch.micro_batch_rows, total // dp)
    return f"{total // dp // micro} micro-batch{'es' * (total // dp > micro)} x {micro} micro_batch_samples {ranks}"


def old_logprobs_in_update(cfg: Config) -> bool:
    """Return whether the policy's update itself gives its old logprobs (`algorithm.old_logprobs`). With auto it does
    if it is the only optimizer step of its rollout, so that its own forward pass computes them, and if nothing needs
    them earlier."""
    a, b = cfg.algorithm, cfg.batch
    if a.old_logprobs != "auto":
        return a.old_logprobs in ("engine", "proxy")
    one_step = b.epochs == 1 and b.minibatch_samples in (0, b.prompts * b.group)
    return cfg.stage.name == "grpo" and one_step and not asks_old_logprobs(cfg)


def asks_old_logprobs(cfg: Config) -> str:
    """Return the key that needs the policy's logprobs before the update, "" if none does."""
    a, methods = cfg.algorithm, set(cfg.mismatch.methods) - {"none"}
    asked = {
        "mismatch.correction": not methods <= set(WEIGHING),  # the update can weigh tokens, and reject none
        "mismatch.stop_above": cfg.mismatch.stop_above > 0,
        "mismatch.expect": cfg.mismatch.expect == "zero",
        "algorithm.kl.placement": a.kl.coef > 0 and a.kl.placement == "reward",
        "algorithm.policy_loss": a.policy_loss in ("clip_cov", "kl_cov"),
        "debug.first_step_checks": cfg.debug.first_step_checks,
        "debug.rollout_only": cfg.debug.rollout_only,
    }
    return next((key for key, asks in asked.items() if asks), "")
