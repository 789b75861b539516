"""Checks that need several sections of the config, or the number of ranks. Nothing is written before they pass."""

from __future__ import annotations

from aligner.config.adapters import check_factors
from aligner.config.checks import exists
from aligner.config.derived import asks_old_logprobs, data_parallel, evaluation_functions, minibatch_samples
from aligner.config.engines import able
from aligner.config.identity import reads, uses
from aligner.config.schema import ROLLOUT_STAGES, Config
from aligner.config.sections.algorithm import GROUP_BASELINES
from aligner.config.sections.mismatch import WEIGHING
from aligner.config.stages import STAGES
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.errors import ConfigError, LayoutError


def validate(cfg: Config, world_size: int) -> None:
    """Raise ConfigError (LayoutError for what does not divide by the ranks) for the first thing that cannot work."""
    _paths(cfg)
    _without_effect(cfg)
    validate_engines(cfg, world_size)
    check_factors(cfg, STAGES[cfg.stage.name].trains and not cfg.debug.rollout_only)
    _replay(cfg)
    _ranks(cfg, world_size)
    validate_model(cfg, cfg.model)
    STAGES[cfg.stage.name].check(cfg)
    if cfg.ptx.coef and cfg.ptx.sequences % (dp := data_parallel(cfg, world_size)):
        raise LayoutError("ptx.sequences", cfg.ptx.sequences, f"a multiple of the {dp} data-parallel ranks")
    if cfg.stage.name in ROLLOUT_STAGES:
        if STAGES[cfg.stage.name].trains:
            _algorithm(cfg)
        _rewards(cfg)
    _environment(cfg)
    _batch(cfg, world_size)


def validate_layout(cfg: Config, world_size: int) -> None:
    """The part of `validate` that asks whether sizes divide, for a job on GPUs; needs no files."""
    _ranks(cfg, world_size)
    validate_model(cfg, cfg.model)
    validate_on_gpu(cfg, cfg.model)
    _batch(cfg, world_size)


def validate_engines(cfg: Config, world_size: int) -> None:
    """The part that asks where engines stand, and whether they may work while the trainer does."""
    _engine_ranks(cfg, world_size)
    _lag(cfg)
    _window(cfg)


def _paths(cfg: Config) -> None:
    if not (cfg.data.train or cfg.data.sources or cfg.debug.train_only):
        raise ConfigError("data.train", "", "a file or folder with training data", "Several are named in data.sources.")
    optional = {
        "data.train": cfg.data.train,
        "data.eval": cfg.data.eval,
        "model.lora.init": cfg.model.lora.init,
        "model.init": "" if cfg.model.init == "random" else cfg.model.init,
        "critic.init": cfg.critic.init if reads(cfg.stage.name, "critic.init") else "",
        "reward.model": cfg.reward.model if reads(cfg.stage.name, "reward.model") else "",
        "run.resume": "" if cfg.run.resume in ("auto", "never") else cfg.run.resume,
        "debug.train_only": cfg.debug.train_only,
        "debug.replay": cfg.debug.replay,
        "ptx.data.train": cfg.ptx.data.train,
    }
    for section, data in (("data", cfg.data), ("ptx.data", cfg.ptx.data)):
        optional |= {f"{section}.sources.{source.label}.path": source.path for source in data.sources}
    for name in ("model", "question_file"):
        optional |= {f"reward.judges.{judge.name}.{name}": getattr(judge, name) for judge in cfg.reward.judges}
    for key, path in optional.items():
        if path:
            exists(key, path)


def _without_effect(cfg: Config) -> None:
    """What was asked for and would silently not happen."""
    metric = cfg.checkpoint.metric
    if cfg.checkpoint.keep_best and metric.startswith("eval/") and not (cfg.data.eval and cfg.run.eval_every):
        expected = "one of the steps' metrics with checkpoint.keep_best, or data.eval and run.eval_every set"
        raise ConfigError("checkpoint.metric", metric, expected)
    if cfg.run.stop.metric and not (cfg.run.eval_every and cfg.data.eval):
        expected = "none without run.eval_every > 0 and data.eval: it is looked at after each evaluation"
        raise ConfigError("run.stop.metric", cfg.run.stop.metric, expected)
    if cfg.debug.shuffle_rewards and "shuffle_rewards" not in STAGES[cfg.stage.name].debug:
        raise ConfigError("debug.shuffle_rewards", True, "false but for stage grpo: rewards are permuted within groups")
    if cfg.debug.record and not STAGES[cfg.stage.name].trains:
        raise ConfigError("debug.record", cfg.debug.record, f"0 for stage {cfg.stage.name}, which trains nothing")
    for key in ("rollout_only", "train_only"):
        value = getattr(cfg.debug, key)
        if value and cfg.stage.name not in ROLLOUT_STAGES:
            expected = f"off for stage {cfg.stage.name}, which has no rollouts: {', '.join(ROLLOUT_STAGES)} have"
            raise ConfigError(f"debug.{key}", value, expected)
    if cfg.debug.first_step_checks and "first_step_checks" not in STAGES[cfg.stage.name].debug:
        expected = f"false for stage {cfg.stage.name}, which has nothing to compare"
        raise ConfigError("debug.first_step_checks", True, expected)
    if cfg.debug.rollout_only and cfg.run.resume not in ("auto", "never"):
        expected = "auto with debug.rollout_only: name the checkpoint in model.init"
        raise ConfigError("run.resume", cfg.run.resume, expected)
    stage = STAGES[cfg.stage.name]
    if stage.scores or not stage.trains or cfg.debug.rollout_only:
        why = "debug.rollout_only, which trains nothing" if cfg.debug.rollout_only else f"stage {cfg.stage.name}"
        for key, value in (("ema.decay", cfg.ema.decay), ("ptx.coef", cfg.ptx.coef)):
            if value:
                raise ConfigError(key, value, f"0 with {why}: it is of a policy that learns")
    if cfg.model.lora.init and (cfg.debug.rollout_only or not STAGES[cfg.stage.name].trains):
        expected = "empty where nothing is trained: adapters come with training. Merge it into a folder for model.init"
        raise ConfigError("model.lora.init", cfg.model.lora.init, expected)
    if cfg.model.lora.rank and cfg.model.lora.dropout and cfg.stage.name in ROLLOUT_STAGES:
        expected = f"0 for stage {cfg.stage.name}: what is dropped in an update was there in the engine's samples"
        raise ConfigError("model.lora.dropout", cfg.model.lora.dropout, expected)
    if cfg.debug.train_only and evaluation_functions(cfg):
        raise ConfigError("eval.generate", True, "false with debug.train_only: no engine is there to answer data.eval")


def _engine_ranks(cfg: Config, world_size: int) -> None:
    """Those with engines: a replica has `engine.tensor_parallel` of them."""
    ranks, width = cfg.engine.ranks, cfg.engine.tensor_parallel
    among = f"engine.ranks={ranks}" if ranks else f"the {world_size} ranks"
    if ranks >= world_size:
        raise LayoutError("engine.ranks", ranks, f"less than the {world_size} ranks of the job: the others train")
    if (ranks or world_size) % width:
        raise LayoutError("engine.tensor_parallel", width, f"a divisor of {among}")
    if not ranks:
        return
    if any(judge.model for judge in cfg.reward.judges) and (world_size - ranks) % width:
        expected = f"a divisor of the {world_size - ranks} ranks that train, where models of reward.judges are"
        raise LayoutError("engine.tensor_parallel", width, expected)
    if cfg.stage.name not in ROLLOUT_STAGES:
        raise ConfigError("engine.ranks", ranks, f"0 for stage {cfg.stage.name}: {', '.join(ROLLOUT_STAGES)} generate")
    if not cfg.engine.can.apart:
        expected = f"{able('apart')} with {among}: on ranks of their own others are not implemented here"
        raise ConfigError("engine.name", cfg.engine.name, expected)
    if cfg.engine.quantization != "none":
        expected = f"none with {among}: whole tensors are quantised, and those ranks get shards"
        raise ConfigError("engine.quantization", cfg.engine.quantization, expected)
    if cfg.debug.record_answers:
        raise ConfigError("debug.record_answers", True, f"false with {among}")


def _lag(cfg: Config) -> None:
    """Where the engines may generate while the trainer trains, and what then may not be asked for."""
    lag, stage = cfg.engine.lag, STAGES[cfg.stage.name]
    if not lag:
        if cfg.engine.window:
            expected = "0 without engine.lag: samples that go on with newer weights are of older ones"
            raise ConfigError("engine.window", cfg.engine.window, expected)
        return
    with_lag = f"with engine.lag={lag}"
    if not cfg.engine.ranks:
        expected = "0 without engine.ranks: on the trainer's ranks engines take turns with it, and nothing overlaps"
        raise ConfigError("engine.lag", lag, expected)
    if stage.pairs or not stage.trains or cfg.debug.rollout_only:
        expected = "0 but for stages grpo and ppo, which correct for older weights, and without debug.rollout_only"
        raise ConfigError("engine.lag", lag, expected)
    if cfg.algorithm.filter_groups:
        expected = f"false {with_lag}: what is generated next would depend on scores"
        raise ConfigError("algorithm.filter_groups", True, expected)
    if cfg.algorithm.advantage == "remax":
        expected = f"another {with_lag}: greedy answers are generated after the samples"
        raise ConfigError("algorithm.advantage", "remax", expected)
    if any(judge.own for judge in cfg.reward.judges):
        expected = f"with models of their own {with_lag}: the engine generates while samples are scored"
        raise ConfigError("reward.judges", [judge.name for judge in cfg.reward.judges], expected)
    if not cfg.checkpoint.rollouts:
        expected = f"true {with_lag}: a checkpoint names rollouts that are stored"
        raise ConfigError("checkpoint.rollouts", False, expected)
    if not cfg.algorithm.ratio_to_engine and not set(cfg.mismatch.methods) & set(WEIGHING):
        expected = f"auto or one with a weight {with_lag} ({', '.join(WEIGHING)}): samples are of older weights"
        raise ConfigError("mismatch.correction", cfg.mismatch.correction, expected)


def _window(cfg: Config) -> None:
    """Who can pause a sample: the native engine, which does not know the experts of tokens that it reads again."""
    if not cfg.engine.window:
        return
    windows = f"with engine.window={cfg.engine.window}"
    if not cfg.engine.can.windows:
        raise ConfigError("engine.name", cfg.engine.name, f"{able('windows')} {windows}: it counts decode steps")
    if cfg.mismatch.replay_routing:
        expected = f"false {windows}: a paused sample's tokens are routed by newer weights"
        raise ConfigError("mismatch.replay_routing", True, expected)
    if cfg.environment.agent:
        expected = f"empty {windows}: a program that asks by itself cannot be begun again where it paused"
        raise ConfigError("environment.agent", cfg.environment.agent, expected)
    if cfg.environment.on and cfg.engine.tensor_parallel > 1:
        expected = f"1 {windows} and {cfg.environment.named[0]}: turns are taken between decode steps, not in rounds"
        raise ConfigError("engine.tensor_parallel", cfg.engine.tensor_parallel, expected)


def _replay(cfg: Config) -> None:
    """Who can tell which experts computed a token: the native engine, and recordings of it (which are looked at)."""
    if not cfg.mismatch.replay_routing:
        return
    if cfg.stage.name not in ROLLOUT_STAGES:
        expected = f"false for stage {cfg.stage.name}: {', '.join(ROLLOUT_STAGES)} have an engine"
        raise ConfigError("mismatch.replay_routing", True, expected)
    if not (cfg.engine.can.routing or cfg.debug.train_only):
        able_to = able("routing")
        expected = f"false with engine.name={cfg.engine.name}, which does not tell the experts of its tokens: {able_to}"
        raise ConfigError("mismatch.replay_routing", True, f"{expected} does")


def _ranks(cfg: Config, world_size: int) -> None:
    parallel, size, world_size = cfg.parallel, cfg.parallel.model_size, world_size - cfg.engine.ranks
    if world_size % size:
        product = f"parallel.tensor*pipeline*context={parallel.tensor}*{parallel.pipeline}*{parallel.context}"
        name = "world size less engine.ranks" if cfg.engine.ranks else "world size"
        raise LayoutError(name, world_size, f"a multiple of {product}={size}", "Change --ranks or the layout.")
    rest = world_size // (parallel.tensor * parallel.pipeline)
    if rest % parallel.expert:
        expected = f"a divisor of the {rest} data- and context-parallel ranks, which share the experts"
        raise LayoutError("parallel.expert", parallel.expert, expected)


def _algorithm(cfg: Config) -> None:
    advantage, stage = cfg.algorithm.advantage, cfg.stage.name
    if cfg.sampling.temperature <= 0:
        raise ConfigError("sampling.temperature", cfg.sampling.temperature, f"a number > 0 for stage {stage}")
    if advantage in GROUP_BASELINES and cfg.batch.group < 2:
        raise ConfigError("batch.group", cfg.batch.group, f"at least 2: {advantage} compares the samples of a prompt")
    if cfg.algorithm.filter_groups and cfg.batch.group < 2:
        raise ConfigError("batch.group", cfg.batch.group, "at least 2 with algorithm.filter_groups: equal to what?")
    if advantage == "gdpo" and (cfg.reward.clip or cfg.reward.normalize):
        key = "clip" if cfg.reward.clip else "normalize"
        expected = "off with algorithm.advantage=gdpo, which sees the reward's components alone"
        raise ConfigError(f"reward.{key}", getattr(cfg.reward, key), expected)
    if cfg.algorithm.ratio_to_engine and set(cfg.mismatch.methods) & set(WEIGHING):
        key = "policy_loss=dppo" if cfg.algorithm.policy_loss == "dppo" else "old_logprobs=engine"
        expected = f"no weights with algorithm.{key}, whose ratio is to the engine already"
        raise ConfigError("mismatch.correction", cfg.mismatch.correction, expected)
    way = cfg.algorithm.old_logprobs
    if way in ("engine", "proxy"):
        asks = asks_old_logprobs(cfg)
        if stage != "grpo":
            raise ConfigError("algorithm.old_logprobs", way, f"auto or recompute for stage {stage}: grpo has others")
        if asks:
            expected = f"auto or recompute with this {asks}, which needs the policy's logprobs before the update"
            raise ConfigError("algorithm.old_logprobs", way, expected)


def _rewards(cfg: Config) -> None:
    asked = STAGES[cfg.stage.name].trains and not cfg.debug.train_only
    r, env = cfg.reward, cfg.environment
    if asked and not (r.functions or r.model or r.judges or env.path or env.agent):
        expected = f"at least one function, or reward.model, for stage {cfg.stage.name}"
        raise ConfigError("reward.functions", [], expected, "Example: reward.functions=[{path: math}]")
    own = any(judge.own for judge in cfg.reward.judges)
    if own and not (cfg.engine.can.any_prompt or cfg.debug.train_only):
        others = "others are built for the data's prompts"
        expected = f"{able('any_prompt')} with reward.judges without model and endpoint: {others}"
        raise ConfigError("engine.name", cfg.engine.name, expected)
    if cfg.batch.group < 2 and any(judge.kind == "pairwise" for judge in cfg.reward.judges):
        expected = "at least 2 with a pairwise judge, which compares the samples of a prompt"
        raise ConfigError("batch.group", cfg.batch.group, expected)
    for judge in cfg.reward.judges:
        assert judge.text  # which may be a file's, and wrong
        deadline_s, limit_s = judge.endpoint.deadline_s, cfg.reward.timeout_s
        if judge.endpoint.base_url and deadline_s >= limit_s:
            key = f"reward.judges.{judge.name}.endpoint.deadline_s"
            raise ConfigError(key, deadline_s, f"less than reward.timeout_s={limit_s:g}, which ends the run")


def _environment(cfg: Config) -> None:
    env = cfg.environment
    if not env.on:
        return
    where = env.named
    if not uses(cfg.stage.name, "environment"):
        able = ", ".join(sorted(name for name in STAGES if uses(name, "environment")))
        raise ConfigError(*where, f"empty for stage {cfg.stage.name}: {able} have trajectories")
    least = cfg.sampling.max_response_tokens
    if env.max_tokens < least:
        expected = f"at least sampling.max_response_tokens={least}: a first answer has to fit"
        raise ConfigError("environment.max_tokens", env.max_tokens, expected)
    single = {
        "reward.model": (cfg.reward.model, ""),
        "reward.judges": ([judge.name for judge in cfg.reward.judges if not judge.endpoint.base_url], []),
        "mismatch.replay_routing": (cfg.mismatch.replay_routing, False),
    }
    for key, (value, off) in single.items():
        if value != off:
            raise ConfigError(key, value, f"{off!r} with {where[0]}: it knows answers of one turn")
    if cfg.algorithm.advantage == "remax":
        expected = f"another one with {where[0]}: its greedy answers would meet environments of their own"
        raise ConfigError("algorithm.advantage", "remax", expected)


def _batch(cfg: Config, world_size: int) -> None:
    """Of a stage that does not train, ranks may have shares of any size."""
    stage = STAGES[cfg.stage.name]
    if stage.trains:
        (_rollout_batch if stage.rollouts else _sequence_batch)(cfg, world_size)


def _rollout_batch(cfg: Config, world_size: int) -> None:
    dp, b = data_parallel(cfg, world_size), cfg.batch
    if b.prompts % dp:
        raise LayoutError("batch.prompts", b.prompts, f"a multiple of the {dp} data-parallel ranks")
    if STAGES[cfg.stage.name].pairs:
        _whole_micro_batches(cfg, b.prompts // dp, f"batch.prompts/dp={b.prompts}/{dp}")
        return
    samples, minibatch = b.prompts * b.group, minibatch_samples(cfg)
    if samples % minibatch:
        expected = f"a divisor of batch.prompts*group={b.prompts}*{b.group}={samples}, or 0 for all of them"
        raise ConfigError("batch.minibatch_samples", minibatch, expected)
    if minibatch % dp:
        raise LayoutError("batch.minibatch_samples", minibatch, f"a multiple of the {dp} data-parallel ranks")
    _whole_micro_batches(cfg, minibatch // dp, f"batch.minibatch_samples/dp={minibatch}/{dp}")


def _sequence_batch(cfg: Config, world_size: int) -> None:
    dp, sequences = data_parallel(cfg, world_size), cfg.batch.sequences
    if sequences % dp:
        raise LayoutError("batch.sequences", sequences, f"a multiple of the {dp} data-parallel ranks")
    _whole_micro_batches(cfg, sequences // dp, f"batch.sequences/dp={sequences}/{dp}")


def _whole_micro_batches(cfg: Config, per_rank: int, meaning: str) -> None:
    """Packing by tokens takes any number of rows; a larger micro-batch than a rank's share is that share."""
    micro = min(cfg.batch.micro_batch_rows, per_rank)
    if not cfg.batch.sizes_itself and not cfg.batch.micro_batch_tokens and per_rank % micro:
        raise ConfigError("batch.micro_batch_samples", micro, f"a divisor of {meaning}={per_rank}")
