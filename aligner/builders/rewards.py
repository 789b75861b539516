"""From a job to its rewards: functions, a reward model, judges."""

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
    found: list[tuple[Any, float]] = [
        (load_function(function, i), function.weight) for i, function in enumerate(job.cfg.reward.functions)
    ]
    if model is not None:
        found.append((model, job.cfg.reward.model_weight))
    if job.tooling and job.tooling.scores:
        found.append((EnvironmentReward(), job.cfg.environment.weight))
    if job.cfg.reward.judges:
        found += on_demand("reward.judges")(job)
    if job.cfg.run.resume != "auto" and job.env.rank == 0:
        job.answers.clear()
    outside = job.cfg.environment.on or any(hasattr(reward, "keep_answers") for reward, _ in found)
    answers = job.answers if outside else None
    if outside and job.env.rank == 0:
        job.built.on_commit.append(lambda _: job.answers.drop(_first_rollout(job)))
    return RewardPipeline(found, job.cfg.reward, partial(_sum_over_data_ranks, job), answers)


def _first_rollout(job: Job) -> int:
    """The first that a start may go through, whichever checkpoint it resumes from: of windows one that was in flight
    then. 0: not known."""
    step, path = complete_checkpoints(Path(job.cfg.run.dir) / "checkpoints")[0]
    try:
        state = record(read_state(path)["state"], str(path), CheckpointError)
        groups = state.record("clock").integers("groups") if "clock" in state else []
    except CheckpointError as error:
        job.say(f"warning: {error}: answers from outside stay")
        return 0
    return min([step, *(number // job.cfg.batch.prompts for number in groups)]) + 1
