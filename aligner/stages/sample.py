"""Samples with their rewards, and from them files to train on: no update.

refit, once -> prompts -> answers -> rewards -> all.jsonl; at the end: best.jsonl, pairs.jsonl, labels.jsonl
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from aligner.config.key import Section, key
from aligner.config.rule import rules
from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    from aligner.builders.job import Job
    from aligner.builders.models import make_reward_model
    from aligner.builders.runs import make_run, saved_first
    from aligner.builders.samples import make_samples
    from aligner.ops.agree import by_rank_0
    from aligner.rollout.samples import SampleBatches
    from aligner.rollout.samples_file import Record, SamplesFile
    from aligner.run.loop import Run
    from aligner.run.sample_table import SampleRow


KEY = "stage.sample"
TAKEN = ("prompt", "row", "sample", "reward", "finished", "scores", "reference")  # columns of all.jsonl
_NAME = f"a name other than {', '.join(TAKEN)}"


def _free(column: str) -> bool:
    return bool(column) and column not in TAKEN


@dataclass
class SampleConfig(Section, key=KEY):
    """Choice of answers, among the `batch.group` to each prompt, for each file of rows (docs/how-to/sample.md)."""

    best: int = key(1, "Number of different answers per prompt in best.jsonl, by reward. 0: all.", least=0)
    reward_above: float = key(
        -math.inf,
        "Write only answers with a larger reward to best.jsonl. A finite value also writes labels.jsonl, which labels "
        "them true.",
    )
    pairs: str = key(
        "rewards",
        "Source of pairs in pairs.jsonl. rewards: best and worst answer; answers: the row's own answer and samples.",
        choices=("rewards", "answers"),
    )
    margin_above: float = key(0.0, "Difference of rewards that a pair must exceed. Equal ones make none.", least=0)
    unfinished: bool = key(False, "Use also answers that sampling.max_response_tokens cut.")
    column: str = key("completion", "Name of the answer's column in all.jsonl and best.jsonl.", valid=(_free, _NAME))
    round: int = key(
        0, "Number in all seeds: another round draws other samples (launchers/iterate.sh counts from 1).", least=0
    )

    @property
    def labels(self) -> bool:
        return math.isfinite(self.reward_above)


RULES = rules("""
=> data.source_paths = | for stage sample: one file in data.train, its rows in their order
=> reward.normalize =false | for stage sample: an answer's reward would depend on those before it
=> debug.rollout_only, debug.train_only off | for stage sample
=> checkpoint.every >=1 | for stage sample: finished batches are kept with it
!reward.any => stage.sample.reward_above =-inf | without reward.functions, reward.model and reward.judges
    | Without rewards: all samples, and pairs with stage.sample.pairs=answers.
!reward.any => stage.sample.best =1 | without reward.functions, reward.model and reward.judges
    | Without rewards: all samples, and pairs with stage.sample.pairs=answers.
""")

STAGE = Stage(
    rollouts=True,
    trains=False,
    answers=False,
    rules=RULES,
    section=SampleConfig,
)


def main(job: Job) -> None:
    cfg, reward_model = job.cfg, make_reward_model(job)
    samples, samples_file = make_samples(job, reward_model)
    cfg.run.steps = min(cfg.run.steps or samples.batches, samples.batches)
    run = make_run(job, {}, {"sampled": samples_file})
    with saved_first(run):
        sample(run, samples, samples_file)
    rewards = bool(samples.score.rewards.rewards)
    for name, count in by_rank_0(lambda: samples_file.finish(cfg.stage.sample, rewards)).items():
        job.say(f"{samples_file.path.with_name(name)}: {count} rows")
    run.logger.close()


def sample(run: Run, samples: SampleBatches, samples_file: SamplesFile) -> None:
    cfg = samples.cfg
    for step in run.steps():
        records, metrics = samples.next(step)
        with run.timers("store"):
            by_rank_0(partial(samples_file.append, records))
        count = len(samples.slots(step)) * cfg.batch.group
        shown = [sample_row(record, cfg.stage.sample.column) for record in records[: cfg.logging.samples_shown]]
        run.finish(step, metrics, shown, metrics["response/tokens_mean"] * count, count)


def sample_row(record: Record, column: str) -> SampleRow:
    """Return a row of the sample table."""
    reward = float("nan") if record["reward"] is None else record["reward"]
    return SampleRow(str(record["prompt"]), record[column], reward, None, record["finished"], record["scores"])
