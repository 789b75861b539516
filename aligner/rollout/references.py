"""Check before GPU time is spent: the reward functions can score every row that may come up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.errors import DataError, RewardError
from aligner.ops.agree import raised_together
from aligner.ops.reduce import gathered
from aligner.rewards.composite import RewardPipeline

LISTED = 10


def check_rows(
    rewards: RewardPipeline, prompts: PromptDataset | PromptMixture, count: int, say: Callable[[str], None]
) -> None:
    """Check the first `count` rows. Collective over the world: each rank reads a share. Raises DataError, which
    lists the rows that cannot be scored, on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with raised_together(RewardError):
        unreadable = rewards.unreadable(prompts, range(rank, count, world), say)
    refuse({i: why for own in gathered(unreadable) for i, why in own.items()}, prompts, count)


def refuse(unreadable: Mapping[int, str], prompts: PromptDataset | PromptMixture, count: int) -> None:
    """Raise DataError if any row is unreadable; `unreadable`: row -> reason."""
    if not unreadable:
        return
    rows = [f"{prompts.where(i)}: {unreadable[i]}" for i in sorted(unreadable)]
    others = f"; and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    raise DataError(
        f"{prompts.report.key}: {len(rows)} of {count} rows cannot be scored by reward.functions and reward.judges. "
        f"{'; '.join(rows[:LISTED])}{others}"
    )
