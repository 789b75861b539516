"""Modules that are imported only where the configuration needs them: the core does not contain them. A new extension
is a row here; a new engine, one of `config/engines.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from aligner.config.derived import (
    counts_outcomes,
    evaluates,
    evaluation_tasks,
    generates,
    learns_from_rollouts,
    recorded_steps,
    undecided,
)
from aligner.config.engines import ENGINES
from aligner.config.quantization import emulated
from aligner.config.schema import Config
from aligner.user_code import is_path

# feature -> module:name, and whether the ranks of a run with this configuration need it
ON_DEMAND: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "logging.trackers": ("aligner.run.trackers.sending:Trackers", lambda cfg: bool(cfg.logging.trackers)),
    "logging.trackers, to check": ("aligner.run.trackers.sending:check", lambda cfg: bool(cfg.logging.trackers)),
    "logging.trackers=tensorboard": (
        "aligner.run.trackers.tensorboard:TensorBoard",
        lambda cfg: "tensorboard" in cfg.logging.trackers,
    ),
    "logging.trackers=wandb": ("aligner.run.trackers.wandb:Wandb", lambda cfg: "wandb" in cfg.logging.trackers),
    "logging.trackers=mlflow": ("aligner.run.trackers.mlflow:Mlflow", lambda cfg: "mlflow" in cfg.logging.trackers),
    "logging.trackers=trackio": ("aligner.run.trackers.trackio:Trackio", lambda cfg: "trackio" in cfg.logging.trackers),
    "logging.trackers=swanlab": ("aligner.run.trackers.swanlab:SwanLab", lambda cfg: "swanlab" in cfg.logging.trackers),
    "auto": ("aligner.builders.sizes:decide", undecided),
    "engine.name": ("aligner.builders.outside_engine:user_engine", lambda cfg: is_path(cfg.engine.name)),
    "engine.name, to check": ("aligner.builders.outside_engine:engine_class", lambda cfg: is_path(cfg.engine.name)),
    "engine.ranks": ("aligner.builders.serving:serve", lambda cfg: cfg.engine.ranks > 0),
    "engine.ranks, between ranks": ("aligner.engines.bridge:Bridge", lambda cfg: cfg.engine.ranks > 0),
    "engine.ranks, to order": ("aligner.engines.native.remote:RemoteEngine", lambda cfg: cfg.engine.ranks > 0),
    "engine.quantization": ("aligner.engines.quantized:quantized_engine", emulated),
    "engine.draft_model": (
        "aligner.engines.native.draft_model:DraftModel",
        lambda cfg: bool(cfg.engine.draft_model and cfg.engine.can.computes_here),
    ),
    "engine.draft_model, to check": (
        "aligner.builders.draft_tokens:check_tokens",
        lambda cfg: bool(cfg.engine.draft_model),
    ),
    "model.lora.init": ("aligner.builders.adapters:initial_factors", lambda cfg: bool(cfg.model.lora.init)),
    "model.megatron.tp_comm_overlap": (
        "aligner.megatron.user_buffers:make_buffers",
        lambda cfg: bool(cfg.model.megatron.get("tp_comm_overlap")),
    ),
    "optim.name=muon": (
        "aligner.megatron.muon:build_muon",
        lambda cfg: "muon" in (cfg.optim.name, cfg.critic.optim.name),
    ),
    "refit.adapters=factors": ("aligner.refit.factors:FactorExchange", lambda cfg: cfg.refit.adapters == "factors"),
    "eval.generate": ("aligner.builders.engines:make_answer_evaluators", evaluates),
    "eval.tasks": ("aligner.builders.suites:make_suite", lambda cfg: bool(evaluation_tasks(cfg))),
    "environment": ("aligner.builders.environments:find_tools", lambda cfg: cfg.environment.on),
    "environment, to generate": ("aligner.builders.environments:make_trajectories", lambda cfg: cfg.environment.on),
    "environment.agent": ("aligner.rollout.agents:agent_generator", lambda cfg: bool(cfg.environment.agent)),
    "algorithm.policy_loss": (
        "aligner.algorithms.outside:user_loss",
        lambda cfg: is_path(cfg.algorithm.policy_loss),
    ),
    "algorithm.advantage": (
        "aligner.algorithms.outside:user_advantages",
        lambda cfg: is_path(cfg.algorithm.advantage),
    ),
    "algorithm.kl.estimator": (
        "aligner.algorithms.outside:user_kl",
        lambda cfg: is_path(cfg.algorithm.kl.estimator),
    ),
    "algorithm.shaping": ("aligner.algorithms.outside:user_shaping", lambda cfg: is_path(cfg.algorithm.shaping)),
    "algorithm.args": (
        "aligner.algorithms.outside:check",
        lambda cfg: bool(cfg.algorithm.args or cfg.algorithm.own_functions()),
    ),
    "curriculum": (
        "aligner.data.curriculum:CurriculumStream",
        lambda cfg: learns_from_rollouts(cfg) and cfg.curriculum.on,
    ),
    "curriculum.column": (
        "aligner.data.curriculum:column_values",
        lambda cfg: learns_from_rollouts(cfg) and cfg.curriculum.on,
    ),
    "algorithm.distill.teacher_prompt": (
        "aligner.data.teacher_prompts:TeacherPrompts",
        lambda cfg: bool(cfg.algorithm.distill.teacher_prompt),
    ),
    "algorithm.distill.teacher_prompt, of another tokenizer": (
        "aligner.data.text_spans:other_tokenizer",
        lambda cfg: bool(cfg.algorithm.distill.teacher_prompt and cfg.algorithm.distill.models()),
    ),
    "algorithm.distill.teacher_prompt, of groups": (
        "aligner.builders.right_answers:make_right_answers",
        lambda cfg: cfg.algorithm.distill.of_group,
    ),
    "algorithm.distill.teacher=self": (
        "aligner.roles.own_teacher:OwnTeacher",
        lambda cfg: cfg.algorithm.distill.own_teacher,
    ),
    "outcomes": ("aligner.rollout.outcomes:Outcomes", counts_outcomes),
    "reward.judges": ("aligner.builders.judges:make_judges", lambda cfg: bool(cfg.reward.judges)),
    "debug.train_only": ("aligner.builders.recordings:make_recorded", lambda cfg: bool(cfg.debug.train_only)),
    "debug.replay": ("aligner.builders.recordings:make_replayed", lambda cfg: bool(cfg.debug.replay)),
    "debug.record": ("aligner.builders.recordings:make_recorder", lambda cfg: recorded_steps(cfg) > 0),
    "mismatch.expect": ("aligner.rollout.layers:first_layer", lambda cfg: cfg.model.invariant),
    "debug.record_answers": ("aligner.engines.recorded:recording", lambda cfg: cfg.debug.record_answers),
}


def imported(path: str) -> Any:
    """Import by `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def on_demand(feature: str) -> Any:
    """Import what `ON_DEMAND` has for this feature."""
    return imported(ON_DEMAND[feature][0])


def demanded(cfg: Config) -> list[str]:
    """Return the modules that all ranks of this run need, engines that any of them does."""
    asked = [path for path, wanted in ON_DEMAND.values() if wanted(cfg)]
    if generates(cfg):
        entry = ENGINES.get(cfg.engine.name)  # a user's is not imported ahead
        asked += [(entry.made_apart_by if cfg.engine.ranks else "") or entry.made_by] if entry else []
    return list(dict.fromkeys(path.partition(":")[0] for path in asked))
