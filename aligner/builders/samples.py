"""Samples that stage sample writes, from a job."""

from __future__ import annotations

from pathlib import Path

from aligner.builders.data import make_sampling, rows_of
from aligner.builders.engines import make_refit, make_verifier
from aligner.builders.job import Job
from aligner.builders.models import make_sampler
from aligner.builders.rewards import make_rewards
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.errors import DataError
from aligner.roles.reward_model import RewardModel
from aligner.rollout.references import check_rows
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.samples import SampleBatches
from aligner.rollout.samples_file import SamplesFile, answer_of
from aligner.rollout.score import Scorer
from aligner.rollout.source import Weights


def make_samples(job: Job, reward_model: RewardModel | None) -> tuple[SampleBatches, SamplesFile]:
    """Make their source, and the files that keep them."""
    cfg, peers = job.cfg, job.layout.peers
    policy, rewards = make_sampler(job), make_rewards(job, reward_model)
    rows = prompt_rows(rows_of(job, cfg.data.train, "data.train"), cfg.data)
    prompts = PromptDataset(rows, job.tokenizer, cfg.data)
    job.output.say_rows(prompts.report)
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    if cfg.stage.sample.pairs == "answers":
        _check_answers(prompts)
    refit = make_refit(job, policy.model)
    sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
    samples = SampleBatches(
        Weights(refit, make_verifier(job, refit, policy, prompts), job.timers),
        SampleGenerator(refit.engine, job.tokenizer, sampling, peers, job.timers),
        Scorer(rewards, peers, job.timers),
        prompts,
        rows,
        job.layout,
        cfg,
    )
    return samples, SamplesFile(Path(cfg.run.dir))


def _check_answers(prompts: PromptDataset) -> None:
    """Check answers for stage.sample.pairs=answers. Raises DataError for the first row without one."""
    for i in range(len(prompts)):
        if not answer_of(prompts[i].fields):
            expected = "an answer to the prompt, in the last turn of `messages` or in the column `completion`"
            raise DataError(f"{prompts.where(i)}: expected {expected} (stage.sample.pairs=answers)")
