"""Checks that need several sections of the config, or the number of ranks. Nothing is written before they pass."""

from __future__ import annotations

from dataclasses import asdict

from aligner.config.algorithm import GROUP_BASELINES, OTHER_BASELINES
from aligner.config.checks import exists
from aligner.config.families import TRAITS
from aligner.config.mismatch import WEIGHING
from aligner.config.rewards import RewardFunctionConfig
from aligner.config.rope import longest_row
from aligner.config.schema import ROLLOUT_STAGES, Config, ModelConfig, ParallelConfig
from aligner.config.trtllm_engine import NAME as TRTLLM_ENGINE
from aligner.config.trtllm_engine import check_run
from aligner.errors import ConfigError, LayoutError


def validate(cfg: Config, world_size: int) -> None:
    """Raise ConfigError (LayoutError for what does not divide by the ranks) for the first thing that cannot work."""
    _paths(cfg)
    _without_effect(cfg)
    _engine_ranks(cfg, world_size)
    _replay(cfg)
    _ranks(cfg, world_size)
    validate_model(cfg, cfg.model)
    if cfg.stage.name in ROLLOUT_STAGES:
        _algorithm(cfg)
        if cfg.stage.name == "ppo":
            _critic(cfg)
        _rewards(cfg)
        _rollout_batch(cfg, world_size)
    else:
        _sequence_batch(cfg, world_size)


def validate_layout(cfg: Config, world_size: int) -> None:
    """The part of `validate` that asks whether sizes divide, for a job on GPUs; needs no files."""
    _ranks(cfg, world_size)
    validate_model(cfg, cfg.model)
    validate_on_gpu(cfg, cfg.model)
    if cfg.stage.name in ROLLOUT_STAGES:
        _rollout_batch(cfg, world_size)
    else:
        _sequence_batch(cfg, world_size)


def validate_model(cfg: Config, model: ModelConfig, scorer: bool = False) -> None:
    """What concerns a model's shape: `cfg.model`, or the shape found in the folder that `model.init` names (that of a
    `scorer`: a reward model or critic, which may be dense beside a policy with experts)."""
    if model is not cfg.model or cfg.model.init == "random":
        _layout(model, cfg.parallel)
        _experts(cfg, model, scorer)
        if not scorer:
            _engine(cfg, model)
        _lengths(cfg, model)


def validate_on_gpu(cfg: Config, model: ModelConfig) -> None:
    """What a CPU does not mind: CUDA's product of all experts, in bfloat16, wants rows of whole 16 bytes."""
    if not model.moe.num_experts or cfg.model.dtype == "float32":
        return
    if model.hidden_size % 8:
        raise LayoutError("model.hidden_size", model.hidden_size, "a multiple of 8 for experts in bfloat16 on a GPU")
    shares = {"parallel.tensor": cfg.parallel.tensor}
    if cfg.stage.name in ROLLOUT_STAGES and cfg.engine.name == "native":
        shares["engine.tensor_parallel"] = cfg.engine.tensor_parallel
    for name, ranks in shares.items():
        if model.expert_ffn // ranks % 8:
            expected = f"a multiple of 8 x {name}={ranks} for experts in bfloat16 on a GPU"
            raise LayoutError(_expert_ffn(model), model.expert_ffn, expected, f"Lower {name}.")


def data_parallel(cfg: Config, world_size: int) -> int:
    return (world_size - cfg.engine.ranks) // cfg.parallel.model_size


def minibatch_samples(cfg: Config) -> int:
    """Samples of one optimizer step over all ranks; batch.minibatch_samples=0 means the whole rollout."""
    return cfg.batch.minibatch_samples or cfg.batch.prompts * cfg.batch.group


def evaluation_functions(cfg: Config) -> list[RewardFunctionConfig]:
    """What judges generated answers to the rows of data.eval; empty where none are to be generated."""
    wanted = cfg.eval.generate and cfg.data.eval and cfg.stage.name != "rm"
    return (cfg.eval.functions or cfg.reward.functions) if wanted else []


def batch_arithmetic(cfg: Config, world_size: int) -> str:
    """How samples become minibatches and micro-batches, with this config's numbers."""
    dp, b = data_parallel(cfg, world_size), cfg.batch
    if cfg.stage.name not in ROLLOUT_STAGES:
        unit = "sequences (pairs)" if cfg.stage.name == "rm" else "sequences"
        return f"{b.sequences} {unit} = {_micro_batches(cfg, b.sequences, dp)}"
    samples, minibatch = b.prompts * b.group, minibatch_samples(cfg)
    text = f"{b.prompts} prompts x {b.group} group = {samples} samples"
    text += f" = {samples // minibatch} minibatches x {minibatch} minibatch_samples"
    text += f" ({b.epochs} epochs)" if b.epochs > 1 else ""
    return f"{text}\n{minibatch} minibatch_samples = {_micro_batches(cfg, minibatch, dp)}"


def _micro_batches(cfg: Config, total: int, dp: int) -> str:
    if cfg.batch.micro_batch_tokens:
        return f"micro-batches of at most {cfg.batch.micro_batch_tokens} micro_batch_tokens x {dp} dp"
    micro = min(cfg.batch.micro_batch_samples, total // dp)
    return f"{total // dp // micro} micro-batches x {micro} micro_batch_samples x {dp} dp"


def _paths(cfg: Config) -> None:
    if not (cfg.data.train or cfg.debug.train_only):
        raise ConfigError("data.train", "", "a file or folder with training data")
    optional = {
        "data.train": cfg.data.train,
        "data.eval": cfg.data.eval,
        "model.init": "" if cfg.model.init == "random" else cfg.model.init,
        "critic.init": cfg.critic.init if cfg.stage.name == "ppo" else "",
        "reward.model": cfg.reward.model if cfg.stage.name in ROLLOUT_STAGES else "",
        "run.resume": "" if cfg.run.resume in ("auto", "never") else cfg.run.resume,
        "debug.train_only": cfg.debug.train_only,
    }
    for key, path in optional.items():
        if path:
            exists(key, path)


def _without_effect(cfg: Config) -> None:
    """What was asked for and would silently not happen."""
    if cfg.checkpoint.keep_best and cfg.checkpoint.metric.startswith("eval/"):
        _evaluated_metric(cfg)
    if cfg.run.stop.metric and not (cfg.run.eval_every and cfg.data.eval):
        expected = "none without run.eval_every > 0 and data.eval: it is looked at after each evaluation"
        raise ConfigError("run.stop.metric", cfg.run.stop.metric, expected)
    if cfg.debug.shuffle_rewards and cfg.stage.name != "grpo":
        raise ConfigError("debug.shuffle_rewards", True, "false but for stage grpo: rewards are permuted within groups")
    for key in ("record", "rollout_only", "train_only"):
        value = getattr(cfg.debug, key)
        if value and cfg.stage.name not in ROLLOUT_STAGES:
            expected = f"off for stage {cfg.stage.name}, which has no rollouts: {', '.join(ROLLOUT_STAGES)} have"
            raise ConfigError(f"debug.{key}", value, expected)
    if cfg.debug.first_step_checks and cfg.stage.name == "sft":
        raise ConfigError("debug.first_step_checks", True, "false for stage sft, which has nothing to compare")
    if cfg.debug.rollout_only and cfg.run.resume not in ("auto", "never"):
        expected = "auto with debug.rollout_only: name the checkpoint in model.init"
        raise ConfigError("run.resume", cfg.run.resume, expected)
    if cfg.debug.train_only and evaluation_functions(cfg):
        raise ConfigError("eval.generate", True, "false with debug.train_only: no engine is there to answer data.eval")


def _evaluated_metric(cfg: Config) -> None:
    """With checkpoint.keep_best: a metric of the evaluations, which must take place and have it."""
    metric = cfg.checkpoint.metric
    if not (cfg.data.eval and cfg.run.eval_every):
        expected = "one of the steps' metrics with checkpoint.keep_best, or data.eval and run.eval_every set"
        raise ConfigError("checkpoint.metric", metric, expected)


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
    if cfg.stage.name not in ROLLOUT_STAGES:
        raise ConfigError("engine.ranks", ranks, f"0 for stage {cfg.stage.name}: {', '.join(ROLLOUT_STAGES)} generate")
    if cfg.engine.name != "native":
        expected = f"native with {among}: others stand on the trainer's ranks"
        raise ConfigError("engine.name", cfg.engine.name, expected)
    if cfg.engine.quantization != "none":
        expected = f"none with {among}: whole tensors are quantised, and those ranks get shards"
        raise ConfigError("engine.quantization", cfg.engine.quantization, expected)
    if cfg.debug.record_answers:
        raise ConfigError("debug.record_answers", True, f"false with {among}")


def _replay(cfg: Config) -> None:
    """Who can tell which experts computed a token: the native engine, and recordings of it (which are looked at)."""
    if not cfg.mismatch.replay_routing:
        return
    if cfg.stage.name not in ROLLOUT_STAGES:
        expected = f"false for stage {cfg.stage.name}: {', '.join(ROLLOUT_STAGES)} have an engine"
        raise ConfigError("mismatch.replay_routing", True, expected)
    if cfg.engine.name != "native" and not cfg.debug.train_only:
        expected = f"false with engine.name={cfg.engine.name}, which does not tell the experts of its tokens: native"
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


def _layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    for name in ("num_heads", "num_kv_heads", *(["ffn_hidden_size"] if model.layers_of("dense") else [])):
        if getattr(model, name) % parallel.tensor:
            raise LayoutError(f"model.{name}", getattr(model, name), f"a multiple of parallel.tensor={parallel.tensor}")
    if parallel.context > 1 and parallel.context_mode == "alltoall":
        shares = parallel.tensor * parallel.context
        for name in ("num_heads", "num_kv_heads"):
            if getattr(model, name) % shares:
                expected = f"a multiple of parallel.tensor*context={parallel.tensor}*{parallel.context}"
                hint = "parallel.context_mode=allgather takes any number of heads."
                raise LayoutError(f"model.{name}", getattr(model, name), expected, hint)
    if model.num_layers % parallel.pipeline:
        raise LayoutError("model.num_layers", model.num_layers, f"a multiple of parallel.pipeline={parallel.pipeline}")


def _engine(cfg: Config, model: ModelConfig) -> None:
    if cfg.engine.name == TRTLLM_ENGINE and cfg.stage.name in ROLLOUT_STAGES:
        check_run(cfg, model)
    if cfg.engine.name == "trtllm" and cfg.stage.name in ROLLOUT_STAGES and TRAITS[model.family].fused:
        expected = "a family whose files keep each matrix by itself with engine.name=trtllm, which gets them so"
        raise ConfigError("model.family", model.family, expected, "engine=native serves it.")
    if cfg.engine.cuda_graphs and model.moe.num_experts:
        raise ConfigError("engine.cuda_graphs", True, "false with experts: how many rows one gets is not known ahead")
    ranks = cfg.engine.tensor_parallel
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    sizes |= {"ffn_hidden_size": model.ffn_hidden_size} if model.layers_of("dense") else {}
    sizes |= {"moe.ffn_hidden_size": model.expert_ffn} if model.moe.num_experts else {}
    for name, size in sizes.items():
        if size % ranks:
            raise LayoutError(f"model.{name}", size, f"a multiple of engine.tensor_parallel={ranks}")


def _experts(cfg: Config, model: ModelConfig, scorer: bool) -> None:
    experts, parallel = model.moe.num_experts, cfg.parallel
    if not experts:
        if cfg.mismatch.replay_routing and not scorer:
            expected = "false for a model without experts (model.moe)"
            raise ConfigError("mismatch.replay_routing", True, expected)
        if parallel.expert > 1 and not scorer:
            raise LayoutError("parallel.expert", parallel.expert, "1 for a model without experts (model.moe)")
        return
    if experts % parallel.expert:
        raise LayoutError("model.moe.num_experts", experts, f"a multiple of parallel.expert={parallel.expert}")
    if model.expert_ffn % parallel.tensor:
        raise LayoutError(_expert_ffn(model), model.expert_ffn, f"a multiple of parallel.tensor={parallel.tensor}")
    if parallel.expert > 1 and cfg.batch.micro_batch_tokens and not cfg.batch.packing:
        expected = "true with parallel.expert > 1 and batch.micro_batch_tokens: every rank takes part in every layer"
        raise ConfigError("batch.packing", False, expected + " of every micro-batch, so all need equally many")


def _expert_ffn(model: ModelConfig) -> str:
    """The key that `expert_ffn` comes from."""
    return "model.moe.ffn_hidden_size" if model.moe.ffn_hidden_size else "model.ffn_hidden_size"


def _lengths(cfg: Config, model: ModelConfig) -> None:
    limit = longest_row(model.rope_scaling, model.max_position)
    of = "model.max_position" if limit == model.max_position else "model.rope_scaling.original_max_position"
    if cfg.data.max_tokens > limit:
        raise ConfigError("data.max_tokens", cfg.data.max_tokens, f"at most {of}={limit}")
    prompt, responses = cfg.data.max_prompt_tokens, {}
    if cfg.stage.name in ROLLOUT_STAGES or (evaluation_functions(cfg) and not cfg.eval.max_response_tokens):
        responses["sampling.max_response_tokens"] = cfg.sampling.max_response_tokens
    if evaluation_functions(cfg):
        responses["eval.max_response_tokens"] = cfg.eval.max_response_tokens
    for key, response in responses.items():
        if prompt + response > limit:
            expected = f"at most {of}={limit} less data.max_prompt_tokens={prompt}"
            raise ConfigError(key, response, expected)


def _algorithm(cfg: Config) -> None:
    advantage, stage = cfg.algorithm.advantage, cfg.stage.name
    if cfg.sampling.temperature <= 0:
        raise ConfigError("sampling.temperature", cfg.sampling.temperature, f"a number > 0 for stage {stage}")
    if stage == "ppo" and advantage != "gae":
        raise ConfigError("algorithm.advantage", advantage, "gae for stage ppo, which has a critic")
    if stage != "ppo" and advantage == "gae":
        known = ", ".join((*GROUP_BASELINES, *OTHER_BASELINES))
        raise ConfigError("algorithm.advantage", advantage, f"{known}; gae is for stage ppo")
    if advantage in GROUP_BASELINES and cfg.batch.group < 2:
        raise ConfigError("batch.group", cfg.batch.group, f"at least 2: {advantage} compares the samples of a prompt")
    if cfg.algorithm.filter_groups and cfg.batch.group < 2:
        raise ConfigError("batch.group", cfg.batch.group, "at least 2 with algorithm.filter_groups: equal to what?")
    if advantage == "gdpo" and (cfg.reward.clip or cfg.reward.normalize):
        key = "clip" if cfg.reward.clip else "normalize"
        expected = "off with algorithm.advantage=gdpo, which sees the reward's components alone"
        raise ConfigError(f"reward.{key}", getattr(cfg.reward, key), expected)
    if cfg.algorithm.policy_loss == "dppo" and set(cfg.mismatch.methods) & set(WEIGHING):
        expected = "no weights with algorithm.policy_loss=dppo, whose ratio is to the engine already"
        raise ConfigError("mismatch.correction", cfg.mismatch.correction, expected)


def _critic(cfg: Config) -> None:
    if not (cfg.critic.init or cfg.reward.model):
        raise ConfigError("critic.init", "", "a folder to start the critic from, or reward.model for stage ppo")
    if cfg.critic.parallel != cfg.parallel:
        expected = "the same as parallel: samples stay on the ranks of the policy's layout"
        raise ConfigError("critic.parallel", asdict(cfg.critic.parallel), expected)


def _rewards(cfg: Config) -> None:
    if not (cfg.reward.functions or cfg.reward.model or cfg.debug.train_only):
        expected = f"at least one function, or reward.model, for stage {cfg.stage.name}"
        raise ConfigError("reward.functions", [], expected, "Example: reward.functions=[{path: math}]")


def _rollout_batch(cfg: Config, world_size: int) -> None:
    dp, b = data_parallel(cfg, world_size), cfg.batch
    if b.prompts % dp:
        raise LayoutError("batch.prompts", b.prompts, f"a multiple of the {dp} data-parallel ranks")
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
    micro = min(cfg.batch.micro_batch_samples, per_rank)
    if not cfg.batch.micro_batch_tokens and per_rank % micro:
        raise ConfigError("batch.micro_batch_samples", micro, f"a divisor of {meaning}={per_rank}")
