"""Samples with their rewards, and from them files to train on: no update.

refit, once -> prompts -> answers -> rewards -> all.jsonl; at the end: best.jsonl, pairs.jsonl, labels.jsonl
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from aligner.builders.data import make_sampling, rows_of
from aligner.builders.engines import make_refit, make_verifier
from aligner.builders.job import Job
from aligner.builders.models import make_reward_model, make_sampler
from aligner.builders.rewards import make_rewards
from aligner.builders.runs import make_run, saved_first
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.errors import DataError
from aligner.ops.agree import by_rank_0
from aligner.roles.reward_model import RewardModel
from aligner.rollout.player import Player
from aligner.rollout.references import check_rows
from aligner.rollout.sampled import Record, Sampled, answer_of
from aligner.rollout.samples import Samples
from aligner.rollout.score import Scorer
from aligner.rollout.source import Weights
from aligner.run.loop import Run
from aligner.run.sample_table import SampleRow


def main(job: Job) -> None:
    cfg, reward_model = job.cfg, make_reward_model(job)
    samples, sampled = make_samples(job, reward_model), Sampled(Path(cfg.run.dir))
    cfg.run.steps = min(cfg.run.steps or samples.batches, samples.batches)
    run = make_run(job, {}, {"sampled": sampled})
    with saved_first(run):
        sample(run, samples, sampled)
    rewards = bool(samples.score.rewards.rewards)
    for name, count in by_rank_0(lambda: sampled.finish(cfg.stage.sample, rewards)).items():
        job.say(f"{sampled.path.with_name(name)}: {count} rows")
    run.logger.close()


def make_samples(job: Job, reward_model: RewardModel | None) -> Samples:
    cfg, peers = job.cfg, job.layout.peers
    policy, rewards = make_sampler(job), make_rewards(job, reward_model)
    rows = prompt_rows(rows_of(job, cfg.data.train, "data.train"), cfg.data)
    prompts = PromptDataset(rows, job.tokenizer, cfg.data)
    job.say_rows(prompts.report)
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    if cfg.stage.sample.pairs == "answers":
        check_answers(prompts)
    refit = make_refit(job, policy.model)
    sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
    return Samples(
        Weights(refit, make_verifier(job, refit, policy, prompts), job.timers),
        Player(refit.engine, job.tokenizer, sampling, peers, job.timers),
        Scorer(rewards, peers, job.timers),
        prompts,
        rows,
        job.layout,
        cfg,
    )


def check_answers(prompts: PromptDataset) -> None:
    """For stage.sample.pairs=answers. Raises DataError for the first row that has none."""
    for i in range(len(prompts)):
        if not answer_of(prompts[i].fields):
            expected = "an answer to the prompt, in the last turn of `messages` or in the column `completion`"
            raise DataError(f"{prompts.where(i)}: expected {expected} (stage.sample.pairs=answers)")


def sample(run: Run, samples: Samples, sampled: Sampled) -> None:
    cfg = samples.cfg
    for step in run.steps():
        records, metrics = samples.next(step)
        with run.timers("store"):
            by_rank_0(partial(sampled.append, records))
        count = len(samples.slots(step)) * cfg.batch.group
        shown = [sample_row(record, cfg.stage.sample.column) for record in records[: cfg.logging.samples_shown]]
        run.finish(step, metrics, shown, metrics["response/tokens_mean"] * count, count)


def sample_row(record: Record, column: str) -> SampleRow:
    """For people to read."""
    reward = float("nan") if record["reward"] is None else record["reward"]
    return SampleRow(str(record["prompt"]), record[column], reward, 0.0, record["finished"], record["scores"])
