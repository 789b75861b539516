"""`aligner plan`: what a config needs and how long its steps take on GPUs that need not be there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aligner.config.resolve import compose_over
from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.vllm import check_model
from aligner.config.validate import validate_engines, validate_layout
from aligner.errors import ConfigError
from aligner.plan.decoding import decode_step, drafting_seconds
from aligner.plan.devices import GIB, Device, find_device
from aligner.plan.job import PlanJob, job_of, known_shape
from aligner.plan.lengths import read_lengths
from aligner.plan.memory import MemoryPlanError, refuse
from aligner.plan.prediction import Prediction, predict, shares_text
from aligner.plan.rows import CRITERIA
from aligner.plan.sizing import Room, sized
from aligner.plan.split import splits
from aligner.plan.sweep import Sweep, widths

FASTER = 0.9  # of the native engine's seconds: a step with vLLM that is worth a line


def main(args: argparse.Namespace, cfg: Config) -> int:
    """Run `aligner plan`. Raises ConfigError for sizes that do not divide, MemoryPlanError for a job that does not
    fit."""
    if args.sweep:
        predictions = _swept(args, cfg)
        print(
            json.dumps([p.data() for p in predictions[: args.top]], indent=1)
            if args.json
            else _table(predictions, args.top)
        )
        return 0
    prediction = predicted(args, cfg)
    predictions = _splits(args, cfg) if prediction.lag else []
    if args.json:
        split = {"split": predictions[0].lag_data()} if predictions else {}
        print(json.dumps(prediction.data() | split, indent=1), flush=True)
    else:
        lines = [prediction.text(), *_split_lines(prediction, predictions), *_engine_lines(args, cfg, prediction)]
        print("\n".join([*lines, *_draft_lines(prediction), *_package_lines(prediction)]), flush=True)
    refuse(prediction.job, prediction.device, prediction.memory)
    return 0


def predicted(args: argparse.Namespace, cfg: Config) -> Prediction:
    """Return the prediction of this layout, whether it fits or not. Raises ConfigError."""
    device, shape, job_for = _asked(args, cfg)
    validate_layout(replace(cfg, model=replace(shape, init="random")), args.gpus)
    return predict(job_for(cfg), device)


def _swept(args: argparse.Namespace, cfg: Config) -> list[Prediction]:
    """Return a prediction of every layout that fits."""
    device, shape, job_for = _asked(args, cfg)
    node = min(args.gpus_per_node, args.gpus)
    ranks = [args.engine_tensor_parallel] if args.engine_tensor_parallel else widths(cfg, args.gpus, node)
    sweep = Sweep(args.gpus, device, node, job_for)
    predictions, nearest = sweep.run(cfg, shape, ranks), sweep.nearest
    if not predictions and nearest is not None:
        raise MemoryPlanError(
            f"no layout of {args.gpus} GPUs fits: the smallest needs {nearest.peak_bytes / GIB:.1f} GiB in phase "
            f"{nearest.peak}, of {nearest.limit_bytes / GIB:.1f} that a program can use of {device.name}. "
            "More GPUs, smaller micro-batches (batch.micro_batch_samples), or less for the engine "
            "(engine.kv_cache_bytes)"
        )
    if not predictions:
        raise ConfigError("--gpus", args.gpus, "a number that some layout divides, with batch.prompts and the heads")
    return predictions


def _splits(args: argparse.Namespace, cfg: Config) -> list[Prediction]:
    device, shape, job_for = _asked(args, cfg)
    return splits(cfg, shape, args.gpus, device, job_for)


def _split_lines(here: Prediction, predictions: list[Prediction]) -> list[str]:
    """Return the report's line about the fastest `engine.ranks`. `predictions`: see `splits`."""
    if not predictions:
        return []
    among = f"of {len(predictions)} splits of the {here.job.gpus} GPUs that divide and fit"
    step_s, window, *shares = predictions[0].overlapped
    if step_s > 0.99 * here.overlapped[0]:
        return [f"engine.ranks={here.ranks} is the fastest {among}"]
    keys = f"engine.ranks={predictions[0].ranks}, with engine.window={window},"
    return [f"{keys} is the fastest {among}: step {step_s:.1f} s, {shares_text(*shares)}"]


def _engine_lines(args: argparse.Namespace, cfg: Config, here: Prediction) -> list[str]:
    """Return the report's line about vLLM where the native engine's steps take longer."""
    if here.job.engine is None or not cfg.engine.can.computes_here:
        return []
    with suppress(ConfigError):  # of what vLLM does not support
        other_cfg = compose_over(cfg, ["engine.name=vllm"])
        RuleContext(other_cfg, args.gpus).check("engines", "factors", "routing", "zero", "ranks")
        check_model(other_cfg, here.job.policy.shape)
        other = predicted(args, other_cfg)
        step_s, native_s = other.overlapped[0], here.overlapped[0]
        if step_s < FASTER * native_s and other.memory.fits:
            return [f"engine=vllm would be faster: step {step_s:.1f} s instead of {native_s:.1f} s"]
    return []


def _draft_lines(here: Prediction) -> list[str]:
    """Return the report's line about how many tokens of a row pay for a step with drafts: those that it takes longer
    than one without."""
    job, engine = here.job, here.job.engine
    if engine is None or not engine.drafts:
        return []
    width, seen = 1 + engine.drafts, job.rows.prompt_mean + job.rows.response_mean / 2

    def longer(rows: int) -> float:
        many, one = (decode_step(job, here.machine, rows, seen, fed)[0] for fed in (width, 1))
        return (many + drafting_seconds(job, here.machine, rows, seen)) / one

    most = max(1, min(job.slots()[0], engine.max_batch // width))
    text = " and ".join(f"{longer(rows):.2f} with {rows} row{'s' * (rows > 1)}" for rows in (1, most))
    return [f"engine.draft_tokens={engine.drafts} pays above engine/mean_acceptance_length {text}"]


def _package_lines(here: Prediction) -> list[str]:
    """Return the report's line about the package that computes linear attention, where it is not installed."""
    job = here.job
    if job.package or job.element > 2 or not job.policy.shape.layers_of("linear"):
        return []
    other = predict(replace(job, package=True), here.device)
    sizes = (f"{p.step_s:.1f} s and {p.memory.peak_bytes / GIB:.1f} GiB" for p in (other, here))
    return ["with pip install 'aligner[linear]' on the GPUs' nodes: step " + " instead of ".join(sizes)]


def _asked(args: argparse.Namespace, cfg: Config) -> tuple[Device, ModelConfig, Callable[[Config], PlanJob]]:
    if args.gpus < 1 or args.gpus_per_node < 1:
        raise ConfigError("--gpus", min(args.gpus, args.gpus_per_node), "a number >= 1")
    validate_engines(cfg, args.gpus)
    if args.acceptance_length and not 1 <= args.acceptance_length <= 1 + cfg.engine.draft_tokens:
        expected = f"1 to {1 + cfg.engine.draft_tokens}, with engine.draft_tokens={cfg.engine.draft_tokens}"
        raise ConfigError("--acceptance-length", args.acceptance_length, expected)
    if args.criteria < 0:
        raise ConfigError("--criteria", args.criteria, "a mean above 0")
    device, shape = find_device(args.device), known_shape(cfg, "a plan")
    sizes = partial(sized, ranks=args.gpus, room=Room.of(device), engine_tensor=args.engine_tensor_parallel)
    plain = partial(
        job_of,
        gpus=args.gpus,
        gpus_per_node=min(args.gpus_per_node, args.gpus),
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        lengths=read_lengths(args.lengths) if args.lengths else (),
        engine_tensor=args.engine_tensor_parallel,
        criteria=args.criteria or CRITERIA,
    )

    def job_for(one: Config) -> PlanJob:
        job = plain(sizes(one))
        return replace(job, engine=job.engine and replace(job.engine, accepted=args.acceptance_length))

    return device, shape, job_for


def _table(predictions: list[Prediction], top: int) -> str:
    lines = [f"{'layout':<34}{'step s':>8}{'tokens/s/GPU':>14}{'MFU %':>7}{'GiB':>7}  {'in':<10}overrides"]
    for p in predictions[:top]:
        grid, job = p.job.grid, p.job
        name = f"{grid}{job.recompute_text}"
        keys = [
            f"parallel.{key}={value}"
            for key, value in (
                ("tensor", grid.tensor),
                ("pipeline", grid.pipeline),
                ("virtual_stages", grid.virtual),
                ("context", grid.context),
                ("expert", grid.expert),
            )
            if value > 1
        ]
        keys += ["parallel.sequence=true"] * grid.sequence + [f"model.recompute={job.policy.shape.recompute}"] * (
            job.recompute > 0
        )
        keys += [f"{key}={value}" for key, value in p.sizes.items()]
        lines.append(
            f"{name:<34}{p.step_s:8.1f}{p.tokens_per_gpu_s:14.0f}{100 * p.mfu:7.0f}{p.memory.peak_bytes / GIB:7.1f}  "
            f"{p.memory.peak:<10}{' '.join(keys)}".rstrip()
        )
    left_out = len(predictions) - top
    return "\n".join(lines + ([f"and {left_out} more that fit"] if left_out > 0 else []))
