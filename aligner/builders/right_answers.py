"""Right answers that teachers read, from a job."""

from __future__ import annotations

from aligner.builders.job import Job
from aligner.builders.rewards import make_rewards
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.rollout.references import check_rows
from aligner.rollout.right_answers import RightAnswers
from aligner.rollout.score import Scorer


def make_right_answers(job: Job, prompts: PromptDataset | PromptMixture) -> RightAnswers:
    """Make what tells right answers to these prompts, by reward.functions."""
    rewards = make_rewards(job, None)
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    return RightAnswers(Scorer(rewards, job.layout.peers, job.timers), job.cfg.eval.full_score)
