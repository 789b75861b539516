"""Rewards, from a job: functions, a reward model, judges."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.builders.job import Job
from aligner.config.on_demand import on_demand
from aligner.errors import CheckpointError
from aligner.foreign import record
from aligner.megatron.checkpoint_files import complete_checkpoints, read_state
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.environment import EnvironmentReward
from aligner.rewards.functions import load_function
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel


def _sum_over_data_ranks(job: Job, values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=job.device)
    dist.all_reduce(total, group=job.layout.pgs.dp)
    return total.tolist()


def make_rewards(job: Job, model: RewardModel | ProcessRewardModel | None) -> RewardPipeline:
    weighted: list[tuple[Any, float]] = [
        (load_function(function, i), function.weight) for i, function in enumerate(job.cfg.reward.functions)
    ]
    if model is not None:
        weighted.append((model, job.cfg.reward.model_weight))
    if job.tooling and job.tooling.scores:
        weighted.append((EnvironmentReward(), job.cfg.environment.weight))
    if job.cfg.reward.judges:
        weighted += on_demand("reward.judges")(job)
    if job.cfg.run.resume != "auto" and job.env.rank == 0:
        job.answers.clear()
    outside = job.cfg.environment.on or any(hasattr(reward, "keep_answers") for reward, _ in weighted)
    answers = job.answers if outside else None
    if outside and job.env.rank == 0:
        job.built.on_commit.append(lambda _: job.answers.drop(_first_rollout(job)))
    return RewardPipeline(weighted, job.cfg.reward, partial(_sum_over_data_ranks, job), answers)


def _first_rollout(job: Job) -> int:
    """Return the first rollout that a start may need, whichever checkpoint it resumes from; with windows one that was
    in flight then. 0: unknown."""
    step, path = complete_checkpoints(Path(job.cfg.run.dir) / "checkpoints")[0]
    try:
        state = record(read_state(path)["state"], str(path), CheckpointError)
        groups = state.record("clock").integers("groups") if "clock" in state else []
    except CheckpointError as error:
        job.say(f"warning: {error}: stored answers of tools and judges are kept")
        return 0
    return min([step, *(number // job.cfg.batch.prompts for number in groups)]) + 1
