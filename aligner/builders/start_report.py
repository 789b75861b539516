"""Report of a run before its first step: where it computes, what it trains, how long, and what it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from aligner.builders.job import Job
from aligner.config.schema import Config
from aligner.errors import AlignerError
from aligner.families.table import parameters
from aligner.families.within import language_model, read_config
from aligner.megatron.model import te_kinds
from aligner.megatron.train import ShardedModel
from aligner.megatron.transformer_engine import TE


def start_report(job: Job, models: Mapping[str, ShardedModel]) -> Iterable[str]:
    """Yield lines for the terminal; `models` are those that a checkpoint has."""
    cfg, dtype = job.cfg, _name(job.dtype)
    yield f"{job.device.type}, {dtype}: {_sizes(job, models)}"
    if job.env.world_size > 1:
        yield _layout(job)
    for kind, reason in te_kinds(job.initial.config).items():
        yield f"TransformerEngine's {kind}: {f'not used, {reason}' if reason else 'used'}"
    yield _length(job)
    yield f"writes to {cfg.run.dir}: {', '.join(_files(cfg, job.env.world_size))}"
    yield from _warnings(job, dtype)


def _layout(job: Job) -> str:
    cfg = job.cfg
    layout = f"{job.layout.data} x tensor {cfg.parallel.tensor} x pipeline {cfg.parallel.pipeline}"
    shared = f", experts over {cfg.parallel.expert}" if job.initial.config.moe.num_experts else ""
    engines = f"; {cfg.engine.ranks} ranks only generate" if cfg.engine.ranks else ""
    return f"{_ranks(job)}: data {layout} x context {cfg.parallel.context}{shared}{engines}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(job: Job, models: Mapping[str, ShardedModel]) -> str:
    shape = job.initial.config
    if not models:
        return f"{parameters(shape):,} parameters, none of them trained"
    models_text = []
    for role, model in models.items():
        kind, outputs = ("score", model.head.outputs) if model.head.kind == "score" else ("lm", 1)
        count = f"{parameters(model.cfg, kind, outputs):,} parameters"
        trained = "only adapters trained" if model.adapted is not None else "all trained"
        models_text.append(f"{role} {count}, {trained if model.optim is not None else 'none of them trained'}")
    return "; ".join(models_text)


def _ranks(job: Job) -> str:
    count = job.env.world_size - job.cfg.engine.ranks
    return "1 rank" if count == 1 else f"{count} ranks"


def _length(job: Job) -> str:
    run = job.cfg.run
    text = f"{run.steps} step{'s' * (run.steps != 1)}"
    if not job.built.rows:
        return text
    ((key, (rows, each)),) = job.built.rows.items()
    taken = getattr(job.cfg.batch, key)
    what = "prompts" if job.cfg.stage.its.rollouts else "rows"
    epochs = f"{run.steps * taken / each / rows:.3g}"
    text += f" of {taken} {what}: {epochs} epoch{'s' * (epochs != '1')}"
    return f"{text} ({rows * each / taken:.4g} steps an epoch of {rows})"


def _files(cfg: Config, ranks: int) -> Iterable[str]:
    if cfg.logging.jsonl:
        yield "metrics.jsonl"
    for name in cfg.logging.trackers:
        yield f"{name}/" if cfg.logging.offline or name == "tensorboard" else f"project {cfg.logging.project} of {name}"
    if ranks > 1:
        yield "logs/ (of the other ranks)"
    if cfg.logging.jsonl:
        yield "report.html at the end"


def _warnings(job: Job, dtype: str) -> Iterable[str]:
    cfg, stored, stage = job.cfg, _stored(job), job.cfg.stage.its
    if cfg.model.dtype == "auto" and stored and stored != dtype and cfg.stage.name != "sample":
        yield (
            f"WARNING: model.dtype=auto is {dtype} on this device, and {cfg.model.init} holds {stored}: the "
            f"export will be {dtype}. model.dtype={stored} keeps it"
        )
    if TE.broken:
        yield f"WARNING: TransformerEngine is not used: {TE.lacks}. model.kernels=own leaves it out without a warning"
    alike = cfg.batch.group if stage.rollouts else stage.rows(cfg)  # rows of a prompt
    if cfg.model.megatron.get("tp_comm_overlap") and cfg.batch.share_prompts and alike > 1:
        yield (
            "WARNING: model.megatron.tp_comm_overlap: micro-batches whose rows share prompts (batch.share_prompts) may "
            "be too small for its buffers, and send as without. `plan` says whether they are"
        )
    warmup, learns = cfg.critic.warmup_steps, cfg.stage.name == "ppo" and not cfg.debug.rollout_only
    if learns and 0 < cfg.run.steps <= warmup:
        yield (
            f"WARNING: run.steps={cfg.run.steps} are all within critic.warmup_steps={warmup}: the critic learns, and "
            "the policy does not change"
        )


def _stored(job: Job) -> str:
    """Return the dtype of the weights in the folder of model.init, by its config.json; "" if unknown."""
    folder: Path | None = job.initial.folder
    if folder is None:
        return ""
    try:
        raw = read_config(folder)
        fields = raw.fields | language_model(raw).fields
        dtype = fields.get("dtype") or fields.get("torch_dtype")
    except AlignerError:
        return ""
    return dtype if dtype in ("float32", "bfloat16") else ""
