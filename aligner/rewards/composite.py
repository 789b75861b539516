"""All rewards of a run together: concurrent, with a timeout, summed by weight, normalised, clipped, in that order."""

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

CHECKED = 256  # rows that a thread checks at a time
SAY_EVERY_S = 10.0
Component = list[float | None]
Early = dict[str, Future]  # a sample's scores by the functions that have begun already


@dataclass
class Scores:
    """Per sample, in the order of the samples.

    total: what the algorithm sees, NaN where invalid; raw: the weighted sum before normalisation and clipping, NaN
    where invalid; components: each function's own scores, unweighted, None = not applicable, NaN = its turn did not
    come in time, or it could not be scored; valid: False where all components are None, or one is NaN.
    """

    total: list[float]
    raw: list[float]
    components: dict[str, Component]
    valid: list[bool]
    clipped: list[bool]

    def metric_sums(self) -> dict[str, tuple[float, float]]:
        """name -> (numerator, denominator), to be summed over ranks and divided; then `finish_metrics`.

        reward/mean and reward/std are of the raw rewards (normalised ones have mean 0 by construction), so are the
        components'; clip_fraction is over valid samples, invalid over all of them.
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
        """name -> value, to be reduced by max over ranks; the minimum travels negated. -inf with no valid sample."""
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
    """Reduced sums (already divided) and maxima -> the metrics people read: mean_square becomes std, negative_min
    becomes min. Other entries pass unchanged."""
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
    """A function that limits the time of each sample, so that many of its samples may be slow."""
    return _bounded(reward) or _late_score(reward) is not None


class RewardPipeline:
    """Scores the samples of this rank. `reduce` sums a list of floats over data-parallel ranks (normalisation).
    `answers`: of rewards that ask outside, and of environments."""

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
        # Samples that others wait for: no other function shall wait behind them, and be late.
        self._waited_for = DaemonPool(config.workers if any(_bounded(reward) for reward, _ in self.rewards) else 0)
        weakref.finalize(self, self._pool.close)
        weakref.finalize(self, self._waited_for.close)

    def probe(self, prompts: Sequence[Prompt]) -> dict[str, Component]:
        """Call every function on two samples of real prompts, so that a broken one fails before training.

        Rewards of the main thread (models) are left out. Touches no statistics. Raises RewardError.
        """
        assert prompts, "a probe needs at least one prompt"
        pair = (prompts[0], prompts[-1])
        samples = [
            Sample(prompt, index, text, prompt.tokens[-1:], finished=True)
            for index, (prompt, text) in enumerate(zip(pair, ("0", "probe"), strict=True))
        ]
        components = self.functions(samples)
        if self.failed(components)[0]:
            raise RewardError(f"two samples of a first try could not be scored: {self.failed(components)[1]}")
        self.take_late()
        return components

    def unreadable(
        self, prompts: Sequence[Prompt], rows: range, say: Callable[[str], None] = lambda text: None
    ) -> dict[int, str]:
        """By row, why a function cannot score some of these, or why none scores it; read in the pool, before training,
        a few at a time. `say` is told now and then how far it is."""

        def check(reward: Reward, part: range) -> dict[int, str]:
            return {part[place]: why for place, why in reward.unreadable([prompts[i] for i in part]).items()}

        parts = [rows[start : start + CHECKED] for start in range(0, len(rows), CHECKED)]
        checking = [reward for reward in self.rewards_of_threads if getattr(reward, "checks_rows", False)]
        jobs = [self._pool.submit(check, reward, part) for reward in checking for part in parts]
        found: dict[int, str] = {}
        unscored: dict[int, list[str]] = {}
        since = time.monotonic()
        for number, job in enumerate(jobs, start=1):
            for row, why in job.result().items():
                if isinstance(why, NotApplicable):
                    unscored.setdefault(row, []).append(why)
                else:
                    found[row] = why
            if time.monotonic() - since > SAY_EVERY_S:
                since = time.monotonic()
                say(f"checking that rows can be scored: {100 * number // len(jobs)} %")
        return {row: whys[0] for row, whys in unscored.items() if len(whys) == len(self.rewards)} | found

    def begin(self, step: int) -> None:
        """What is scored from now on is of this rollout."""
        if self.answers is not None:
            self.answers.begin(step)

    def forget_failures(self, first: int | None = None) -> None:
        """This rollout is given up because of them, or those from the `first` on."""
        if self.answers is not None:
            self.answers.forget_failures(first)

    def functions(self, samples: Sequence[Sample], early: Mapping[int, Early] | None = None) -> dict[str, Component]:
        """The components of all functions, without models: what one rank can score of its own share. `early`: what
        `score_early` returned for some of the samples, by their place."""
        return _Scoring(self, list(samples), early or {}).components()

    @property
    def score_early(self) -> Callable[[Sample], Early] | None:
        """Starts the functions that score each sample for itself, while other samples are still generated. None where
        nothing begins early."""
        those = [reward for reward in self.rewards_of_threads if _per_sample(reward)] if self.config.overlap else []

        def start(sample: Sample) -> Early:
            return {
                reward.name: self.submit(reward, lambda reward=reward: scores_of(reward, [sample])) for reward in those
            }

        return start if those else None

    def take_late(self) -> dict[str, tuple[float, float]]:
        """reward/<name>/late -> (samples that were not scored in time, samples) of this rank since the last call, for
        each function that has a score for them; and what judges count."""
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
        """How many samples those that `may_fail` could not score, and why."""
        failed = {r: [v is not None and math.isnan(v) for v in components[r.name]] for r in self.may_fail}
        causes = [f"`{reward.name}`: {reward.failure()}" for reward, those in failed.items() if any(those)]
        return sum(map(any, zip(*failed.values(), strict=True))), "; ".join(causes)

    @property
    def rewards_of_threads(self) -> list[Reward]:
        return [reward for reward, _ in self.rewards if not getattr(reward, "main_thread", False)]

    def count_late(self, reward: Reward, samples: int, late: bool) -> None:
        if reward.name in self._late:
            self._late[reward.name][0] += samples * late
            self._late[reward.name][1] += samples

    def models(self, samples: Sequence[Sample]) -> dict[str, Component]:
        """The components of the models. Collective over the ranks that share each model; all pass the same samples."""
        return {
            reward.name: scores_of(reward, samples)
            for reward, _ in self.rewards
            if getattr(reward, "main_thread", False)
        }

    def combine(self, components: dict[str, Component], count: int, update: bool) -> Scores:
        """Weighted sum -> normalise -> clip."""
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
        """To the threads that score."""
        pool = self._waited_for if _bounded(reward) else self._pool
        return pool.submit(function, *args, last=_late_score(reward) is not None)

    def close(self) -> None:
        self._pool.close()
        self._waited_for.close()


class _Scoring:
    """One batch with the functions of a pipeline, which start at once; `begun`: what `score_early` started before."""

    def __init__(self, pipeline: RewardPipeline, samples: list[Sample], begun: Mapping[int, Early]):
        self._pipeline, self._samples = pipeline, samples
        self._started = threading.Event()
        self._start_s = 0.0
        self._jobs: dict[Future, tuple[Reward, list[int]]] = {}  # and the places of its samples
        if begun:
            self._start()  # those have had time already: now the limit is of what is left
        for reward in pipeline.rewards_of_threads:
            ahead = {place: found[reward.name] for place, found in begun.items() if reward.name in found}
            self._jobs |= {job: (reward, [place]) for place, job in ahead.items()}
            for part in self._chunks(reward, [i for i in range(len(samples)) if i not in ahead]):
                job = pipeline.submit(reward, self._run, reward, part)
                self._jobs[job] = (reward, part)

    def components(self) -> dict[str, Component]:
        """Raises RewardError if a function raised, returned no score, or is not ready reward.timeout_s after the
        first of this batch's functions began."""
        scored: dict[str, Component] = {}
        late = self._wait()
        for job, (reward, places) in self._jobs.items():
            component = scored.setdefault(reward.name, [None] * len(self._samples))
            # what had its turn and did not end is late; what waited behind others says nothing of its answer
            late_score = math.nan if job.cancelled() else _late_score(reward)
            values = [late_score] * len(places) if job in late else job.result()
            for place, value in zip(places, values, strict=True):
                component[place] = value
            self._pipeline.count_late(reward, len(places), job in late)
        return scored

    def _chunks(self, reward: Reward, places: list[int]) -> list[list[int]]:
        if not places:
            return [] if self._samples else [[]]  # of no samples at all: the function is named all the same
        parts = self._pipeline.config.workers if _per_sample(reward) else 1
        size = 1 if _one_by_one(reward) else -(-len(places) // parts)  # what is ready in time counts
        return [places[start : start + size] for start in range(0, len(places), size)]

    def _start(self) -> None:
        if not self._started.is_set():
            self._start_s = time.monotonic()
            self._started.set()

    def _run(self, reward: Reward, places: list[int]) -> Component:
        if not _bounded(reward):
            self._start()
        return scores_of(reward, [self._samples[place] for place in places])

    def _wait(self) -> set[Future]:
        """Returns the jobs that are late and have a score for that."""
        limit_s = self._pipeline.config.timeout_s
        bounded = {job: of for job, of in self._jobs.items() if _bounded(of[0])}
        pending: set[Future] = set()
        if limited := {job: of for job, of in self._jobs.items() if job not in bounded}:
            # The clock starts with the first function, not at submit: a batch may queue behind an earlier one.
            begun = self._started.wait(limit_s)
            left_s = max(0.0, self._start_s + limit_s - time.monotonic()) if begun else 0.0
            pending = self._unfinished(limited, left_s)
        for job in pending:
            job.cancel()
        counts: dict[str, int] = {}
        for reward, part in (self._jobs[job] for job in pending):
            if _late_score(reward) is None:
                counts[reward.name] = counts.get(reward.name, 0) + len(part)
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
        """Those of these jobs that are not ready by then. Raises what one of them raised."""
        finished, pending = wait(jobs, limit_s, return_when=FIRST_EXCEPTION)
        for job in finished:
            if not job.cancelled() and job.exception() is not None:
                self._cancel()
                job.result()
        return pending

    def _cancel(self) -> None:
        for job in self._jobs:
            job.cancel()
