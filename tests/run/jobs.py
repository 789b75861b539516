"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import aligner.builders.job
import aligner.builders.stage
import aligner.megatron.checkpoint
import aligner.roles.model_init
import aligner.run.checkpoints
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.engines import bridge
from aligner.engines.native.engine import NativeEngine
from aligner.errors import AlignerError, EngineError, RewardError
from aligner.rollout import requests
from aligner.rollout.groups import Groups
from aligner.rollout.score import Scorer
from tests.stages import PowerCut, power_cut_in_update


def run_stage(arguments: list[str], signals: StopSignals | None = None) -> int:
    """A stage on all ranks of the job, whose process group stays."""
    return run_config(compose(arguments), signals)


def run_config(cfg: Config, signals: StopSignals | None = None) -> int:
    world = dist.get_world_size()
    validate(cfg, world)
    if dist.get_rank() == 0:
        freeze(cfg, cfg.run.dir)
    dist.barrier()
    homes = (aligner.builders.stage, aligner.builders.job)
    leave = aligner.builders.stage.leave_distributed
    for home in homes:
        home.leave_distributed = lambda: None
    try:
        return aligner.builders.stage.run_stage(cfg, RankEnv(dist.get_rank(), dist.get_rank(), world, world), signals)
    finally:
        for home in homes:
            home.leave_distributed = leave
        torch.use_deterministic_algorithms(False)


class Told(NamedTuple):
    """Of a stage on one rank."""

    end: str  # its exit code, "cut", or the error
    generated: int  # calls of this rank's engine
    requests: set[tuple[int, int, int, int]]  # rollout, prompt, sample and seed of those of training
    out: str


def played(arguments: list[str], cut: int = 0, reward_fails: int = 0, engine_fails: int = 0) -> Told:
    """`run_stage`, until on the trainer's ranks the power goes off in the first update of step `cut`, scoring the
    rollout of step `reward_fails` fails, or this rank's engine does in its call number `engine_fails`."""
    bridge.LAST_WORDS_S = 0.1
    calls, scored, made, out = [0], [0], set(), io.StringIO()
    generate, score, seed = NativeEngine._generated, Scorer.__call__, requests.request_seed

    def counted(engine: NativeEngine, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == engine_fails:
            raise EngineError("no answer from the device")
        return generate(engine, *args, **kwargs)

    def graded(scorer: Scorer, groups: Groups) -> Groups:
        scored[0] += 1
        if scored[0] == reward_fails:
            raise RewardError("no answer from the service")
        return score(scorer, groups)

    def noted(*request: int) -> int:
        made.add((*request[1:], seed(*request)))
        return seed(*request)

    with (
        patch.object(NativeEngine, "_generated", counted),
        patch.object(Scorer, "__call__", graded),
        patch.object(requests, "request_seed", noted),
        patch("aligner.answers.AnswerLog.drop"),  # for runs that go through all of them again
        redirect_stdout(out),
        redirect_stderr(out),
    ):
        try:
            end = _cut_in_update(arguments, cut) if cut else str(run_stage(arguments))
        except AlignerError as error:
            end = f"{type(error).__name__}: {error}"
    return Told(end, calls[0], made, out.getvalue())


def _cut_in_update(arguments: list[str], step: int) -> str:
    try:
        with power_cut_in_update(step):
            return str(run_stage(arguments))
    except PowerCut:
        dist.barrier()
        return "cut"
