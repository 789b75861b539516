"""All rewards of a run: scored concurrently with a timeout, summed by weight, normalised and clipped, in that order."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

from aligner.answers import AnswerLog
from aligner.config.sections.rewards import RewardConfig
from aligner.errors import ConfigError, RewardError
from aligner.rewards.base import NotApplicable, Reward, scores_of
from aligner.rewards.normalizer import Reduce, RunningNormalizer
from aligner.rewards.workers import DaemonPool
from aligner.types import Prompt, Sample

CHECKED = 256  # rows per job of a thread that checks rows
SAY_EVERY_S = 10.0
Component = list[float | None]
Early = dict[str, Future]  # a sample's scores that have begun already, by function


@dataclass
class Scores:
    """Scores per sample, in the order of the samples.

    total: the algorithm's input, NaN where invalid. raw: the weighted sum before normalisation and clipping, NaN where
    invalid. components: each function's own scores, unweighted; None = not applicable, NaN = it did not begin in time,
    or could not be scored. valid: False if all components are None, or one is NaN.
    """

    total: list[float]
    raw: list[float]
    components: dict[str, Component]
    valid: list[bool]
    clipped: list[bool]

    def metric_sums(self) -> dict[str, tuple[float, float]]:
        """Return name -> (numerator, denominator), to be summed over ranks and divided; then `finish_metrics`.

        reward/mean and reward/std are of the raw rewards (normalised ones have mean 0 by construction), also for
        components. clip_fraction is over valid samples, invalid over all samples.
        """
        raw = [value for value in self.raw if not math.isnan(value)]
        sums = {
            **_moments("reward", raw),
            "reward/clip_fraction": (float(sum(self.clipped)), float(len(raw))),
            "reward/invalid": (float(self.valid.count(False)), float(len(self.valid))),
        }
        for name, component in self.components.items():
            sums.update(_moments(f"reward/{name}", [v for v in component if v is not None and not math.isnan(v)]))
        return sums

    def metric_maxima(self) -> dict[str, float]:
        """Return name -> value, to be reduced by max over ranks; the minimum is negated. -inf with no valid sample."""
        raw = [value for value in self.raw if not math.isnan(value)]
        return {
            "reward/max": max(raw, default=-math.inf),
            "reward/negative_min": max((-value for value in raw), default=-math.inf),
        }


def _moments(prefix: str, values: Sequence[float]) -> dict[str, tuple[float, float]]:
    count = float(len(values))
    return {
        f"{prefix}/mean": (math.fsum(values), count),
        f"{prefix}/mean_square": (math.fsum(value * value for value in values), count),
    }


def finish_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Turn reduced sums (already divided) and maxima into final metrics: mean_square becomes std, negative_min becomes
    min. Other entries pass unchanged."""
    finished = {}
    for name, value in metrics.items():
        if name.endswith("/mean_square"):
            prefix = name.removesuffix("/mean_square")
            finished[f"{prefix}/std"] = math.sqrt(max(0.0, value - metrics[f"{prefix}/mean"] ** 2))
        elif name.endswith("/negative_min"):
            finished[name.removesuffix("negative_min") + "min"] = -value
        else:
            finished[name] = value
    return finished


def _per_sample(reward: Reward) -> bool:
    return getattr(reward, "per_sample", False)


def _late_score(reward: Reward) -> float | None:
    return getattr(reward, "late_score", None)


def _bounded(reward: Reward) -> bool:
    return getattr(reward, "bounded", False)


def _one_by_one(reward: Reward) -> bool:
    """Return whether a function limits the time of each sample, so that many of its samples may be slow."""
    return _bounded(reward) or _late_score(reward) is not None


class RewardPipeline:
    """A scorer of this rank's samples.

    `reduce` sums a list of floats over data-parallel ranks (normalisation). `answers` is the log of rewards that ask
    outside, and of environments.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[Reward, float]],
        config: RewardConfig,
        reduce: Reduce | None = None,
        answers: AnswerLog | None = None,
    ):
        names = [reward.name for reward, _ in rewards]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ConfigError(f"reward.functions[{i}].name", name, "a name that no other reward function has")
        self.rewards, self.config, self.reduce, self.answers = list(rewards), config, reduce, answers
        for reward, _ in rewards:
            if answers is not None and hasattr(reward, "keep_answers"):
                reward.keep_answers(answers, reward.name)
        self.normalizer = RunningNormalizer()
        self._late = {r.name: [0.0, 0.0] for r in self.rewards_of_threads if _late_score(r) is not None}
        self._pool = DaemonPool(config.workers)
        # Bounded functions have threads of their own, so that no other function is late behind them.
        self._waited_for = DaemonPool(config.workers if any(_bounded(reward) for reward, _ in self.rewards) else 0)
        weakref.finalize(self, self._pool.close)
        weakref.finalize(self, self._waited_for.close)

    def probe(self, prompts: Sequence[Prompt]) -> dict[str, Component]:
        """Call every function on two samples of real prompts, so that a broken function fails before training.

        Rewards of the main thread (models) are skipped. Statistics do not change. Raises RewardError.
        """
        assert prompts, "a probe needs at least one prompt"
        pair = (prompts[0], prompts[-1])
        samples = [
            Sample(prompt, index, text, prompt.tokens[-1:], finished=True)
            for index, (prompt, text) in enumerate(zip(pair, ("0", "probe"), strict=True))
        ]
        components = self.functions(samples)
        if self.failed(components)[0]:
            raise RewardError(f"the two samples of the probe could not be scored: {self.failed(components)[1]}")
        self.take_late()
        return components

    def unreadable(
        self, prompts: Sequence[Prompt], rows: range, say: Callable[[str], None] = lambda text: None
    ) -> dict[int, str]:
        """Return by row why a function cannot score it, or why no function scores it.

        The threads check `CHECKED` rows per job, before training. `say` gets the progress every SAY_EVERY_S.
        """

        def check(reward: Reward, chunk: range) -> dict[int, str]:
            return {chunk[index]: why for index, why in reward.unreadable([prompts[i] for i in chunk]).items()}

        chunks = [rows[start : start + CHECKED] for start in range(0, len(rows), CHECKED)]
        checking = [reward for reward, _ in self.rewards if getattr(reward, "checks_rows", False)]
        jobs = [self._pool.submit(check, reward, chunk) for reward in checking for chunk in chunks]
        refused: dict[int, str] = {}
        unscored: dict[int, list[str]] = {}
        since = time.monotonic()
        for number, job in enumerate(jobs, start=1):
            for row, why in job.result().items():
                if isinstance(why, NotApplicable):
                    unscored.setdefault(row, []).append(why)
                else:
                    refused[row] = why
            if time.monotonic() - since > SAY_EVERY_S:
                since = time.monotonic()
                say(f"checking that rows can be scored: {100 * number // len(jobs)} %")
        return {row: whys[0] for row, whys in unscored.items() if len(whys) == len(self.rewards)} | refused

    def begin(self, step: int) -> None:
        """Start the rollout of `step`: later scores belong to it."""
        if self.answers is not None:
            self.answers.begin(step)

    def forget_failures(self, first: int | None = None) -> None:
        """Drop logged failures of this rollout, or those from the `first` on, because it is given up."""
        if self.answers is not None:
            self.answers.forget_failures(first)

    def functions(self, samples: Sequence[Sample], early: Mapping[int, Early] | None = None) -> dict[str, Component]:
        """Return the components of all functions, without models, for this rank's share.

        `early` holds results of `score_early` for some of the samples, by index.
        """
        return _Scoring(self, list(samples), early or {}).components()

    @property
    def score_early(self) -> Callable[[Sample], Early] | None:
        """A function that starts the independent scores of a sample while others are generated. None if nothing begins
        early."""
        early = [reward for reward in self.rewards_of_threads if _per_sample(reward)] if self.config.overlap else []

        def start(sample: Sample) -> Early:
            return {
                reward.name: self.submit(reward, lambda reward=reward: scores_of(reward, [sample])) for reward in early
            }

        return start if early else None

    def take_late(self) -> dict[str, tuple[float, float]]:
        """Return reward/<name>/late -> (samples not scored in time, samples) of this rank since the last call.

        It has an entry for each function with a score for late samples, and the counts of judges.
        """
        taken = {f"reward/{name}/late": (late, count) for name, (late, count) in self._late.items()}
        self._late = {name: [0.0, 0.0] for name in self._late}
        for reward, _ in self.rewards:
            if hasattr(reward, "take_counts"):
                taken |= {f"reward/{reward.name}/{name}": counts for name, counts in reward.take_counts().items()}
        return taken

    @property
    def may_fail(self) -> list[Reward]:
        return [reward for reward in self.rewards_of_threads if getattr(reward, "may_fail", False)]

    def failed(self, components: Mapping[str, Component]) -> tuple[int, str]:
        """Return how many samples the rewards that `may_fail` could not score, and why."""
        failed = {r: [v is not None and math.isnan(v) for v in components[r.name]] for r in self.may_fail}
        causes = [f"`{reward.name}`: {reward.failure()}" for reward, samples in failed.items() if any(samples)]
        return sum(map(any, zip(*failed.values(), strict=True))), "; ".join(causes)

    @property
    def rewards_of_threads(self) -> list[Reward]:
        return [reward for reward, _ in self.rewards if not getattr(reward, "main_thread", False)]

    def count_late(self, reward: Reward, samples: int, late: bool) -> None:
        if reward.name in self._late:
            self._late[reward.name][0] += samples * late
            self._late[reward.name][1] += samples

    def models(self, samples: Sequence[Sample]) -> dict[str, Component]:
        """Return the components of the models. Collective over the ranks that share each model; all pass the same
        samples."""
        return {
            reward.name: scores_of(reward, samples)
            for reward, _ in self.rewards
            if getattr(reward, "main_thread", False)
        }

    def combine(self, components: dict[str, Component], count: int, update: bool) -> Scores:
        """Return the weighted sums, normalised, then clipped."""
        raw, valid = [], []
        for i in range(count):
            terms = [(components[reward.name][i], weight) for reward, weight in self.rewards]
            known = [weight * value for value, weight in terms if value is not None]
            raw.append(math.fsum(known) if known else math.nan)
            valid.append(not math.isnan(raw[-1]))
        total = raw
        if self.config.normalize:
            if update:
                self.normalizer.update([value for value in raw if not math.isnan(value)], self.reduce)
            total = [self.normalizer(value) for value in raw]
            total = [value if ok else math.nan for value, ok in zip(total, valid, strict=True)]
        limit = self.config.clip
        clipped = [bool(limit) and abs(value) > limit for value in total]  # NaN compares false
        total = [math.copysign(limit, value) if cut else value for value, cut in zip(total, clipped, strict=True)]
        return Scores(total, raw, components, valid, clipped)

    def state_dict(self) -> dict[str, float]:
        return self.normalizer.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.normalizer.load_state_dict(state)

    def submit(self, reward: Reward, function: Callable, *args: Any) -> Future:
        """Run a function on the threads that score."""
        pool = self._waited_for if _bounded(reward) else self._pool
        return pool.submit(function, *args, last=_late_score(reward) is not None)

    def close(self) -> None:
        self._pool.close()
        self._waited_for.close()


class _Scoring:
    """The scoring of one batch by a pipeline's functions, which start at once; `begun` holds results of
    `score_early`."""

    def __init__(self, pipeline: RewardPipeline, samples: list[Sample], begun: Mapping[int, Early]):
        self._pipeline, self._samples = pipeline, samples
        self._started = threading.Event()
        self._start_s = 0.0
        self._jobs: dict[Future, tuple[Reward, list[int]]] = {}  # and the indices of its samples
        if begun:
            self._start()  # early functions have had time already: the limit applies to the rest
        for reward in pipeline.rewards_of_threads:
            ahead = {index: early[reward.name] for index, early in begun.items() if reward.name in early}
            self._jobs |= {job: (reward, [index]) for index, job in ahead.items()}
            for chunk in self._chunks(reward, [i for i in range(len(samples)) if i not in ahead]):
                job = pipeline.submit(reward, self._run, reward, chunk)
                self._jobs[job] = (reward, chunk)

    def components(self) -> dict[str, Component]:
        """Return the components. Raises RewardError if a function raises, returns no score, or is late.

        A function is late if it is not ready reward.timeout_s after the first of this batch's functions began.
        """
        scored: dict[str, Component] = {}
        late = self._wait()
        for job, (reward, indices) in self._jobs.items():
            component = scored.setdefault(reward.name, [None] * len(self._samples))
            # a job that began and did not end is late; one that never began has no score
            late_score = math.nan if job.cancelled() else _late_score(reward)
            values = [late_score] * len(indices) if job in late else job.result()
            for index, value in zip(indices, values, strict=True):
                component[index] = value
            self._pipeline.count_late(reward, len(indices), job in late)
        return scored

    def _chunks(self, reward: Reward, indices: list[int]) -> list[list[int]]:
        if not indices:
            return [] if self._samples else [[]]  # without samples the function still has an entry
        count = self._pipeline.config.workers if _per_sample(reward) else 1
        size = 1 if _one_by_one(reward) else -(-len(indices) // count)  # samples ready in time keep their score
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def _start(self) -> None:
        if not self._started.is_set():
            self._start_s = time.monotonic()
            self._started.set()

    def _run(self, reward: Reward, indices: list[int]) -> Component:
        if not _bounded(reward):
            self._start()
        return scores_of(reward, [self._samples[i] for i in indices])

    def _wait(self) -> set[Future]:
        """Wait for the jobs; return those that are late and have a score for that."""
        limit_s = self._pipeline.config.timeout_s
        bounded = {job: of for job, of in self._jobs.items() if _bounded(of[0])}
        pending: set[Future] = set()
        if limited := {job: of for job, of in self._jobs.items() if job not in bounded}:
            # The clock starts with the first function, not at submit: a batch may queue behind an earlier one.
            started = self._started.wait(limit_s)
            left_s = max(0.0, self._start_s + limit_s - time.monotonic()) if started else 0.0
            pending = self._unfinished(limited, left_s)
        for job in pending:
            job.cancel()
        counts: dict[str, int] = {}
        for reward, indices in (self._jobs[job] for job in pending):
            if _late_score(reward) is None:
                counts[reward.name] = counts.get(reward.name, 0) + len(indices)
        if counts:
            self._cancel()
            names = ", ".join(f"`{name}`" for name in counts)
            raise RewardError(
                f"reward {names} still running with {max(counts.values())} of {len(self._samples)} samples pending: "
                f"expected all scores within reward.timeout_s={limit_s:g}"
            )
        if bounded:
            self._unfinished(bounded, None)
        return pending

    def _unfinished(self, jobs: Iterable[Future], limit_s: float | None) -> set[Future]:
        """Return those of these jobs that are not ready within `limit_s`. Raises the error of a job."""
        finished, pending = wait(jobs, limit_s, return_when=FIRST_EXCEPTION)
        for job in finished:
            if not job.cancelled() and job.exception() is not None:
                self._cancel()
                job.result()
        return pending

    def _cancel(self) -> None:
        for job in self._jobs:
            job.cancel()
