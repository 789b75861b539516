"""Checks of a model's shape against the layout, the engine and the lengths of a config."""

from __future__ import annotations

from aligner.config.derived import evaluation_functions, response_limit
from aligner.config.engines import ENGINES
from aligner.config.identity import uses
from aligner.config.schema import ROLLOUT_STAGES, STAGES, Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import check_te
from aligner.config.sections.model.rope import longest_row
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError, LayoutError


def validate_model(cfg: Config, model: ModelConfig, scorer: bool = False) -> None:
    """What concerns a model's shape: `cfg.model`, or the shape found in the folder that `model.init` names (that of a
    `scorer`: a reward model or critic, which may be dense beside a policy with experts)."""
    if model is not cfg.model or cfg.model.init == "random":
        check_te(model)
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
    if _generates(cfg) and cfg.engine.can.computes_here:
        shares["engine.tensor_parallel"] = cfg.engine.tensor_parallel
    for name, ranks in shares.items():
        if model.expert_ffn // ranks % 8:
            expected = f"a multiple of 8 x {name}={ranks} for experts in bfloat16 on a GPU"
            raise LayoutError(_expert_ffn(model), model.expert_ffn, expected, f"Lower {name}.")


def check_node(cfg: Config, node: range, world_size: int) -> None:
    """A child process reaches the devices of its own node: all ranks of a replica must be on this one, or none."""
    width = cfg.engine.tensor_parallel
    for first in range(world_size - cfg.engine.ranks if cfg.engine.ranks else 0, world_size, width):
        last = first + width - 1
        if (first in node) != (last in node):
            expected = f"replicas within a node of {len(node)} ranks with engine.name={cfg.engine.name}"
            raise LayoutError("engine.tensor_parallel", width, f"{expected}: ranks {first} to {last} are on two")


def _generates(cfg: Config) -> bool:
    return cfg.stage.name in ROLLOUT_STAGES or STAGES[cfg.stage.name].generates(cfg)


def _layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    for name, size in (_heads(model) | _widths(model)).items():
        if size % parallel.tensor:
            raise LayoutError(f"model.{name}", size, f"a multiple of parallel.tensor={parallel.tensor}")
    if parallel.context > 1 and parallel.context_mode == "alltoall":
        shares = parallel.tensor * parallel.context
        for name, size in _heads(model).items():
            if size % shares:
                expected = f"a multiple of parallel.tensor*context={parallel.tensor}*{parallel.context}"
                hint = "parallel.context_mode=allgather takes any number of heads."
                raise LayoutError(f"model.{name}", size, expected, hint)
    if model.num_layers % parallel.pipeline:
        raise LayoutError("model.num_layers", model.num_layers, f"a multiple of parallel.pipeline={parallel.pipeline}")


def _heads(model: ModelConfig) -> dict[str, int]:
    """Of attention and of linear attention."""
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    return heads | ({"linear.key_heads": model.linear.key_heads} if model.linear.key_heads else {})


def _widths(model: ModelConfig) -> dict[str, int]:
    """Of the MLPs that every token meets."""
    found = {"ffn_hidden_size": model.ffn_hidden_size} if model.layers_of("dense") else {}
    return found | {"moe.shared_ffn_hidden_size": model.moe.shared_ffn_hidden_size}


def _engine(cfg: Config, model: ModelConfig) -> None:
    entry = ENGINES[cfg.engine.name]
    if _generates(cfg) and entry.check is not None:
        entry.check(cfg, model)
    if _generates(cfg) and cfg.run.deterministic and not entry.can.repeats:
        expected = f"false with engine.name={cfg.engine.name}{entry.reasons['repeats']}"
        raise ConfigError("run.deterministic", True, expected, "engine.name=native repeats bit by bit.")
    if cfg.engine.can.computes_here and cfg.engine.cuda_graphs is True and model.moe.num_experts:
        raise ConfigError("engine.cuda_graphs", True, "false with experts: how many rows one gets is not known ahead")
    validate_shares(cfg, model)


def validate_shares(cfg: Config, model: ModelConfig, key: str = "model") -> None:
    """Of a native engine's ranks."""
    ranks = cfg.engine.tensor_parallel
    sizes = _heads(model) | _widths(model)
    sizes |= {"moe.ffn_hidden_size": model.expert_ffn} if model.moe.num_experts else {}
    for name, size in sizes.items():
        if size % ranks:
            raise LayoutError(f"{key}.{name}", size, f"a multiple of engine.tensor_parallel={ranks}")


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
    rows = {"data.max_tokens": cfg.data.max_tokens} if uses(cfg.stage.name, "data.max_tokens") else {}
    rows |= {"ptx.data.max_tokens": cfg.ptx.data.max_tokens} if cfg.ptx.coef else {}
    for key, tokens in rows.items():
        if tokens > limit:
            raise ConfigError(key, tokens, f"at most {of}={limit}")
    prompt, responses = cfg.data.max_prompt_tokens, {}
    if _generates(cfg) or (evaluation_functions(cfg) and not cfg.eval.max_response_tokens):
        key = "environment.max_tokens" if cfg.environment.on else "sampling.max_response_tokens"
        responses[key] = response_limit(cfg)
    if evaluation_functions(cfg):
        responses["eval.max_response_tokens"] = cfg.eval.max_response_tokens
    for key, response in responses.items():
        if prompt + response > limit:
            expected = f"at most {of}={limit} less data.max_prompt_tokens={prompt}"
            raise ConfigError(key, response, expected)
