"""Rows of stages that compare or rate answers, from a job."""

from __future__ import annotations

from aligner.builders.data import rows_of
from aligner.builders.job import Job
from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PairDataset, PreferenceDataset, ScoredDataset
from aligner.data.formats import preference_rows, scored_rows, step_rows, unpaired_rows
from aligner.data.steps import StepsDataset
from aligner.data.unpaired import UnpairedDataset


def make_pairs(job: Job, path: str, key: str, data: DataConfig) -> PairDataset:
    """Read the pairs that stage dpo learns."""
    preference = job.cfg.algorithm.preference
    key_of_loss = "algorithm.preference.loss"
    columns = dict.fromkeys(("chosen_reward", "rejected_reward"), key_of_loss) if preference.rewards else {}
    columns |= {"weight": "algorithm.preference.row_weights"} if preference.row_weights else {}
    rows = preference_rows(rows_of(job, path, key), data, preference.margin, columns)
    return _reported(job, PairDataset(rows, job.tokenizer, data, key))


def make_unpaired(job: Job, path: str, key: str, data: DataConfig) -> UnpairedDataset:
    """Read the answers that stage kto learns."""
    return _reported(job, UnpairedDataset(unpaired_rows(rows_of(job, path, key), data), job.tokenizer, data, key))


def make_rated(job: Job, path: str, key: str, data: DataConfig) -> PreferenceDataset | ScoredDataset:
    """Read the rows that a reward model learns: pairs, or answers with scores."""
    loss, rows = job.cfg.algorithm.reward_loss, rows_of(job, path, key)
    if loss.kind != "bradley_terry":
        return _reported(job, ScoredDataset(scored_rows(rows, data, loss.attributes), job.tokenizer, data, key))
    pairs = preference_rows(rows, data, loss.margin, whole=True)
    return _reported(job, PreferenceDataset(pairs, job.tokenizer, data, key))


def make_steps(job: Job, path: str, key: str, data: DataConfig) -> StepsDataset:
    """Read the rows that a process reward model learns: answers whose steps are labelled."""
    loss, rows = job.cfg.algorithm.reward_loss, step_rows(rows_of(job, path, key), data)
    return _reported(job, StepsDataset(rows, job.tokenizer, data, loss.separator, loss.last_step_only, key))


def _reported[D: PairDataset | UnpairedDataset | PreferenceDataset | ScoredDataset | StepsDataset](
    job: Job, dataset: D
) -> D:
    job.output.say_rows(dataset.report)
    return dataset
