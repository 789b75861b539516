"""Composition: weights, None, concurrency, timeouts, normalisation over ranks, clipping, metrics."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import threading
from concurrent.futures import wait
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.rewards import RewardConfig
from aligner.errors import ConfigError, RewardError
from aligner.rewards.composite import RewardPipeline, finish_metrics
from aligner.rewards.functions import FunctionReward
from aligner.rewards.normalizer import RunningNormalizer
from aligner.rewards.workers import DaemonPool
from aligner.types import Prompt, Sample
from tests.clocks import times_up

finite = st.floats(-1e6, 1e6)


def samples(values) -> list[Sample]:
    return [Sample(Prompt(i, (1,), "", {"v": v}), 0, str(v), (1,), True) for i, v in enumerate(values)]


def column(name: str, scale: float = 1.0) -> FunctionReward:
    def f(samples):
        return [None if s.prompt.fields["v"] is None else scale * s.prompt.fields["v"] for s in samples]

    return FunctionReward(f, name, {}, "reward.functions[0]")


def custom(function, name: str = "custom") -> FunctionReward:
    return FunctionReward(function, name, {}, "reward.functions[0]")


class Pipeline(RewardPipeline):
    def score(self, samples, update=True):
        components = self.functions(samples) | self.models(samples)
        return self.combine(components, len(samples), update)


def pipeline(rewards, reduce=None, **config) -> Pipeline:
    return Pipeline(rewards, RewardConfig(**config), reduce)


def test_none_is_no_part_of_the_sum_and_all_none_is_invalid():
    only_first = custom(lambda samples: [5.0, None, None], "first")
    scores = pipeline([(column("v"), 2.0), (only_first, 0.5)]).score(samples([1.0, 3.0, None]))
    assert scores.total[:2] == [4.5, 6.0]
    assert math.isnan(scores.total[2])
    assert scores.valid == [True, True, False]
    assert scores.components == {"v": [1.0, 3.0, None], "first": [5.0, None, None]}


def test_no_samples_give_empty_scores():
    scores = pipeline([(column("v"), 1.0)], normalize=True).score([])
    assert (scores.total, scores.valid, scores.components) == ([], [], {"v": []})


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"reward.functions\[1\].name='v'"):
        pipeline([(column("v"), 1.0), (column("v"), 1.0)])


def test_functions_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=120)  # breaks unless all three wait in it together

    def f(samples):
        barrier.wait()
        return [1.0 for _ in samples]

    rewards = [(custom(f, f"f{i}"), 1.0) for i in range(3)]
    assert pipeline(rewards, workers=3).score(samples([0.0])).total == [3.0]


def test_per_sample_functions_are_cut_into_chunks_others_are_not():
    sizes: dict[str, list[int]] = {"whole": [], "parts": []}

    def whole(samples):
        sizes["whole"].append(len(samples))
        return [s.prompt.fields["v"] for s in samples]

    def parts(samples):
        sizes["parts"].append(len(samples))
        return [s.prompt.fields["v"] for s in samples]

    parts.per_sample = True
    scores = pipeline([(custom(whole, "whole"), 1.0), (custom(parts, "parts"), 1.0)], workers=3).score(
        samples(range(7))
    )
    assert scores.total == [2.0 * v for v in range(7)]
    assert sizes["whole"] == [7]
    assert sorted(sizes["parts"]) == [1, 3, 3]


def per_sample(function, name: str = "each") -> FunctionReward:
    function.per_sample = True
    return custom(function, name)


def test_scores_that_were_begun_early_are_not_asked_for_again():
    asked: dict[str, list] = {"each": [], "whole": []}

    def each(samples):
        asked["each"].append([s.response for s in samples])
        return [s.prompt.fields["v"] for s in samples]

    def whole(samples):
        asked["whole"].append([s.response for s in samples])
        return [10.0 * s.prompt.fields["v"] for s in samples]

    batch, rewards = samples(range(6)), pipeline([(custom(whole, "whole"), 1.0), (per_sample(each), 1.0)], workers=1)
    early = {index: rewards.score_early(batch[index]) for index in (4, 1)}
    components = rewards.functions(batch, early)
    assert components == rewards.functions(batch)
    assert components == {"whole": [10.0 * v for v in range(6)], "each": list(range(6))}
    assert asked["each"] == [["4"], ["1"], ["0", "2", "3", "5"], [str(v) for v in range(6)]]
    assert asked["whole"] == [[str(v) for v in range(6)]] * 2
    every = {index: rewards.score_early(sample) for index, sample in enumerate(batch)}
    assert rewards.functions(batch, every) == components


def test_only_functions_of_single_samples_begin_early():
    whole, each = custom(lambda samples: [0.0], "whole"), per_sample(lambda samples: [0.0])
    assert not pipeline([(whole, 1.0)]).score_early and pipeline([(whole, 1.0), (each, 1.0)]).score_early
    assert not pipeline([(each, 1.0)], overlap=False).score_early


def test_what_goes_wrong_early_is_reported_with_the_batch():
    release = threading.Event()

    def each(samples):
        if samples[0].prompt.fields["v"] == 2:
            raise KeyError("gone")
        release.wait(120)
        return [0.0]

    batch = samples(range(3))
    rewards = pipeline([(per_sample(each), 1.0)], timeout_s=0.2, workers=3)
    broken = {2: rewards.score_early(batch[2])}
    wait(broken[2].values())
    with pytest.raises(RewardError, match=r"`each`.*sample 0, response '2'.*KeyError"):
        rewards.functions(batch, broken)
    slow = {index: rewards.score_early(batch[index]) for index in (0, 1)}
    with pytest.raises(RewardError, match=r"`each` still running with 2 of 2 samples pending.*reward\.timeout_s=0\.2"):
        rewards.functions(batch[:2], slow)
    release.set()


def test_a_model_runs_in_the_callers_thread():
    class Model:
        name, main_thread = "model", True

        def __call__(self, samples):
            assert threading.current_thread() is threading.main_thread()
            return [1.0 for _ in samples]

    assert pipeline([(Model(), 3.0), (column("v"), 1.0)]).score(samples([1.0])).total == [4.0]


def test_timeout_names_function_pending_samples_and_key():
    release, ended = threading.Event(), []

    def slow(samples):
        release.wait(120)
        ended.append(samples)
        return [0.0 for _ in samples]

    with pytest.raises(RewardError, match=r"`slow`.* 5 of 5 samples.*reward\.timeout_s=0\.2"):
        pipeline([(column("v"), 1.0), (custom(slow, "slow"), 1.0)], timeout_s=0.2).score(samples(range(5)))
    assert not ended
    release.set()


def bounded(function, name: str = "bounded", late: float = 0.0) -> FunctionReward:
    """Of a function that limits the time of each sample itself."""
    function.late_score = late
    return per_sample(function, name)


def test_what_is_late_of_a_function_with_a_limit_of_its_own_gets_its_late_score_and_is_counted(monkeypatch):
    release = threading.Event()

    def slow(samples):
        if samples[0].prompt.fields["v"] % 2:
            release.wait(120)
        return [5.0 for _ in samples]

    rewards = pipeline([(bounded(slow, late=-1.0), 1.0)], workers=4)
    times_up(monkeypatch, bounded={0: "done", 1: "running", 2: "done", 3: "running"})
    scores = rewards.score(samples([0, 1, 2, 3]))
    assert scores.total == [5.0, -1.0, 5.0, -1.0]
    assert rewards.take_late() == {"reward/bounded/late": (2.0, 4.0)}
    early = {0: rewards.score_early(samples([1])[0])}
    times_up(monkeypatch, bounded={0: "running", 1: "done"})
    assert rewards.functions(samples([1, 2]), early) == {"bounded": [-1.0, 5.0]}
    assert rewards.take_late() == {"reward/bounded/late": (1.0, 2.0)}
    release.set()


def test_what_waited_behind_slow_answers_is_invalid_and_not_wrong(monkeypatch):
    """Two threads, held by slow samples: the right answers behind them have no score, whatever other functions say."""
    release = threading.Event()

    def slow(samples):
        if samples[0].prompt.fields["v"] < 0:
            release.wait(120)
        return [1.0 for _ in samples]

    rewards = pipeline([(bounded(slow), 1.0), (column("v"), 0.5)], workers=2)
    times_up(monkeypatch, v={0: "done"}, bounded={0: "done", 1: "running", 2: "running", 3: "waiting"})
    scores = rewards.score(samples([2, -1, -1, 4, 6]))
    release.set()
    assert scores.valid == [True, True, True, False, False]
    assert scores.total[:3] == [2.0, -0.5, -0.5] and all(map(math.isnan, scores.total[3:]))
    assert scores.components["bounded"][:3] == [1.0, 0.0, 0.0] and scores.components["v"] == [2.0, -1.0, -1.0, 4.0, 6.0]
    sums = scores.metric_sums()
    assert sums["reward/bounded/mean"] == (1.0, 3.0) and sums["reward/mean"] == (1.0, 3.0)
    assert sums["reward/invalid"] == (2.0, 5.0) and rewards.take_late() == {"reward/bounded/late": (4.0, 5.0)}


def test_a_function_that_bounds_its_samples_is_waited_for_and_holds_up_no_other():
    """Longer than reward.timeout_s, by more samples than there are threads, some of them begun early: all have their
    score, and the other function has had a thread meanwhile."""
    ended, others = threading.Event(), []

    def own_limit(samples):
        assert ended.wait(120)
        return [3.0 for _ in samples]

    def other(samples):
        others.extend(samples)
        threading.Timer(0.4, ended.set).start()
        return [1.0 for _ in samples]

    own_limit.bounded = True
    rewards = pipeline([(per_sample(own_limit, "own"), 1.0), (custom(other, "other"), 1.0)], workers=2, timeout_s=0.2)
    batch = samples(range(6))
    early = {index: rewards.score_early(batch[index]) for index in range(3)}
    assert rewards.functions(batch, early) == {"own": [3.0] * 6, "other": [1.0] * 6}
    assert len(others) == 6 and rewards.take_late() == {}


def test_slow_answers_keep_no_other_function_waiting(monkeypatch):
    """Asked for first, by the one thread, and never done but for one: the other function is scored all the same, where
    a queue in the order of calls would end the run."""
    asked, release, slow_ones = threading.Event(), threading.Event(), []

    def slow(samples):
        slow_ones.append(samples)
        assert (asked if len(slow_ones) == 1 else release).wait(120)
        return [1.0]

    def submit(*job, last, real=DaemonPool.submit):
        try:
            return real(*job, last=last)
        finally:
            last or asked.set()

    monkeypatch.setattr(DaemonPool, "submit", submit)
    rewards = pipeline([(bounded(slow), 1.0), (column("v"), 1.0)], workers=1)
    times_up(monkeypatch, v={0: "done"})
    assert rewards.functions(samples(range(50)))["v"] == list(range(50))
    assert rewards.take_late()["reward/bounded/late"][0] >= 49
    release.set()


def test_rows_that_cannot_be_scored_are_reported_by_their_number():
    def f(samples, odd=1):
        return [0.0 for _ in samples]

    f.unreadable = lambda prompts, odd=1: {i: f"{p.fields['v']}?" for i, p in enumerate(prompts) if p.id % 7 == odd}
    rewards = pipeline([(FunctionReward(f, "f", {"odd": 3}, "key"), 1.0), (column("v"), 1.0)], workers=2)
    prompts = [s.prompt for s in samples(range(1000))]
    assert rewards.unreadable(prompts, range(1000)) == {i: f"{i}?" for i in range(3, 1000, 7)}
    assert rewards.unreadable(prompts, range(1, 900, 2)) == {i: f"{i}?" for i in range(3, 900, 14)}
    assert pipeline([(column("v"), 1.0)]).unreadable(prompts, range(1000)) == {}


def test_a_hanging_function_does_not_keep_the_process():
    program = (
        "import time\nfrom aligner.config.sections.rewards import RewardConfig\n"
        "from aligner.rewards.composite import *\n"
        "from aligner.rewards.functions import FunctionReward\n"
        "hang = FunctionReward(lambda samples: time.sleep(600), 'hang', {}, 'k')\n"
        "sample = Sample(Prompt(0, (1,), ''), 0, '', (1,), True)\n"
        "try:\n    RewardPipeline([(hang, 1.0)], RewardConfig(timeout_s=0.1)).functions([sample])\n"
        "except RewardError:\n    print('told')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "told\n"


def test_a_raising_function_ends_the_batch_at_once():
    release, ended = threading.Event(), []

    def slow(samples):
        release.wait(120)
        ended.append(samples)
        return [0.0 for _ in samples]

    def broken(samples):
        raise KeyError("gone")

    with pytest.raises(RewardError, match=r"`broken`.*KeyError"):
        pipeline([(custom(slow, "slow"), 1.0), (custom(broken, "broken"), 1.0)], timeout_s=200).score(samples([1.0]))
    assert not ended
    release.set()


def test_probe_finds_a_broken_function_and_touches_no_statistics():
    prompts = [Prompt(i, (1, 2), "", {"v": 1.0}) for i in range(5)]
    good = pipeline([(column("v"), 1.0)], normalize=True)
    assert good.probe(prompts) == {"v": [1.0, 1.0]}
    assert good.probe(prompts[:1]) == {"v": [1.0, 1.0]}
    assert good.state_dict()["count"] == 0
    with pytest.raises(RewardError, match="returned 1 scores: expected 2"):
        pipeline([(custom(lambda samples: [1.0]), 1.0)]).probe(prompts)


class Ranks:
    """`reduce` of several ranks in lock-step, one thread each."""

    def __init__(self, count: int):
        self.barrier, self.slots = threading.Barrier(count, timeout=120), [[0.0]] * count

    def of(self, rank: int):
        def reduce(values: list[float]) -> list[float]:
            self.slots[rank] = values
            self.barrier.wait()
            total = [math.fsum(column) for column in zip(*self.slots, strict=True)]
            self.barrier.wait()
            return total

        return reduce

    def run(self, function) -> list:
        results: list = [None] * len(self.slots)

        def work(rank):
            results[rank] = function(rank, self.of(rank))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(finite, max_size=6), min_size=1, max_size=5))
def test_normalizer_equals_the_statistics_of_all_values(batches):
    normalizer = RunningNormalizer()
    for batch in batches:
        normalizer.update(batch)
    values = [value for batch in batches for value in batch]
    assert normalizer.count == len(values)
    if values:
        scale = max(map(abs, values)) + 1e-9
        assert normalizer.mean == pytest.approx(statistics.fmean(values), abs=1e-9 * scale)
        assert normalizer.std == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-9 * scale)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), finite), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(0, 6)
)
def test_merged_over_ranks_equals_the_whole_batch(batches, cut):
    """Rank 0 holds the first `cut` samples (perhaps none), rank 1 the rest: the scores are those of one rank."""
    single = pipeline([(column("v"), 1.0)], normalize=True, clip=1.5)
    expected = [single.score(samples(batch)).total for batch in batches]
    single.close()

    def one_rank(rank, reduce):
        own = pipeline([(column("v"), 1.0)], reduce, normalize=True, clip=1.5)
        parts = [batch[:cut] if rank == 0 else batch[cut:] for batch in batches]
        totals = [own.score(samples(share)).total for share in parts]
        own.close()
        return totals

    first, second = Ranks(2).run(one_rank)
    for whole, a, b in zip(expected, first, second, strict=True):
        assert a + b == pytest.approx(whole, rel=1e-6, abs=1e-6, nan_ok=True)


def test_normalisation_survives_a_large_offset():
    normalizer = RunningNormalizer()
    for start in range(0, 1000, 100):
        normalizer.update([1e9 + (i % 2) for i in range(start, start + 100)])
    assert normalizer.std == pytest.approx(0.5, rel=1e-6)


def test_equal_rewards_normalise_to_zero():
    assert pipeline([(column("v"), 1.0)], normalize=True).score(samples([0.1] * 7)).total == [0.0] * 7


def test_order_is_sum_then_normalise_then_clip():
    values = [0.0, 0.0, 0.0, 100.0]
    scores = pipeline([(column("v"), 2.0)], normalize=True, clip=1.0).score(samples(values))
    mean, std = statistics.fmean([2 * v for v in values]), statistics.pstdev([2 * v for v in values])
    assert scores.total == pytest.approx([-mean / std] * 3 + [1.0])
    assert scores.raw == [0.0, 0.0, 0.0, 200.0]
    assert scores.metric_sums()["reward/clip_fraction"] == (1.0, 4.0)
    plain = pipeline([(column("v"), 1.0)], clip=2.0).score(samples([-5.0, 1.0, None]))
    assert plain.total[:2] == [-2.0, 1.0]


def test_evaluation_uses_but_does_not_change_the_statistics():
    it = pipeline([(column("v"), 1.0)], normalize=True)
    it.score(samples([0.0, 2.0]))
    before = it.state_dict()
    assert it.score(samples([3.0]), update=False).total == [2.0]
    assert it.state_dict() == before


def test_a_loaded_state_scores_the_same():
    one, other = (pipeline([(column("v"), 1.0)], normalize=True) for _ in range(2))
    one.score(samples([1.0, 4.0, 9.0]))
    other.load_state_dict(one.state_dict())
    assert one.score(samples([2.0, 5.0])).total == other.score(samples([2.0, 5.0])).total


@given(st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=2, max_size=12), st.integers(1, 11))
def test_metrics_reduced_over_ranks_are_those_of_all_samples(values, cut):
    it = pipeline([(column("v", scale=3.0), 0.5)])
    parts = [it.score(samples(share)) for share in (values[:cut], values[cut:])]
    it.close()
    sums = [share.metric_sums() for share in parts]
    reduced = {}
    for name in sums[0]:
        top, bottom = (sum(s[name][i] for s in sums) for i in (0, 1))
        reduced[name] = top / bottom if bottom else math.nan
    for name in ("reward/max", "reward/negative_min"):
        reduced[name] = max(share.metric_maxima()[name] for share in parts)
    metrics = finish_metrics(reduced)
    known = [1.5 * v for v in values if v is not None]
    assert metrics["reward/invalid"] == pytest.approx(1 - len(known) / len(values))
    if known:
        assert metrics["reward/mean"] == pytest.approx(statistics.fmean(known), abs=1e-9)
        assert metrics["reward/std"] == pytest.approx(statistics.pstdev(known), abs=1e-5)
        assert metrics["reward/v/std"] == pytest.approx(2 * statistics.pstdev(known), abs=1e-5)
        assert (metrics["reward/min"], metrics["reward/max"]) == (min(known), max(known))
    assert not any("negative" in name or "square" in name for name in metrics)


def test_config_is_not_changed():
    config = RewardConfig(clip=1.0)
    before = replace(config)
    Pipeline([(column("v"), 1.0)], config).score(samples([5.0]))
    assert config == before
