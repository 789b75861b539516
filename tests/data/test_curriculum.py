"""Which prompts a rollout takes: by a column of the rows and the pass rates of the run, as a plain loop would."""

import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.resolve import compose
from aligner.config.sections.curriculum import CurriculumConfig
from aligner.config.sections.data import DataConfig
from aligner.data.curriculum import CurriculumStream, column_values
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.stream import IndexStream, MixedStream
from aligner.errors import ConfigError, DataError
from tests import stages
from tests.run import jobs

GROUP = 4


class Prompts:
    """A dataset's numbers: ids with gaps, as of dropped rows."""

    def __init__(self, size, seed=0):
        self.ids = np.arange(size) * 3 + 1
        self.values = np.random.default_rng(seed).integers(0, 5, size).astype(float)


def stream_of(config, size=12, batch=4, share=Fraction(1), seed=3, prefix="curriculum"):
    return CurriculumStream(config, (size, seed, True, batch, "data.train"), Prompts(size), share, prefix)


def passes(row, visit):
    """How many samples of a row's visit pass: rows of rate 0, 1 and between."""
    rate = (0.0, 1.0, 0.5, 0.25, 0.9)[row % 5]
    return sum(random.Random(f"{row} {visit} {i}").random() < rate for i in range(GROUP))


class Loop:
    """The oracle: row after row, in lists, with the samples of all visits."""

    def __init__(self, config, size, batch, seed=3):
        self.config, self.size, self.batch = config, size, batch
        self.orders = IndexStream(size, seed)
        values, self.position, self.taken = Prompts(size).values, 0, 0
        sign = 1 if config.first == "low" else -1
        self.place_of = {row: i for i, row in enumerate(sorted(range(size), key=lambda r: (sign * values[r], r)))}
        self.credit, self.samples = [0.0] * size, [[] for _ in range(size)]

    def weight(self, row):
        config, latest, counted = self.config, [], 0
        for visit in reversed(self.samples[row]):
            if counted >= config.attempts:
                break
            latest, counted = latest + visit, counted + len(visit)
        if counted < config.attempts or not latest:
            return 1.0
        rate, floor = sum(latest) / len(latest), 1 / (1 + config.skip_epochs)
        if not config.pass_rates[0] < rate < config.pass_rates[1]:
            return floor
        return max(floor, 4 * rate * (1 - rate)) if config.learnability else 1.0

    def next(self):
        while True:
            epoch, at = divmod(self.position, self.size)
            row = int(self.orders._order(epoch)[at])
            self.position += 1
            step = self.taken // self.batch + 1
            steps = self.config.steps
            if step < steps and self.place_of[row] >= max(self.batch, math.ceil(self.size * step / steps)):
                continue
            self.credit[row] += self.weight(row)
            if self.credit[row] > 0.999999:
                self.credit[row] -= 1
                self.taken += 1
                return row


CONFIGS = st.builds(
    lambda column, gate: CurriculumConfig(**column, **gate),
    st.sampled_from([{}, {"column": "n", "steps": 5}, {"column": "n", "steps": 9, "first": "high"}]),
    st.sampled_from(
        [{"skip_epochs": k, "attempts": n, "pass_rates": r, "learnability": x}
         for k in (1, 3) for n in (1, 4, 9) for r in ([0.0, 1.0], [0.2, 0.6]) for x in (False, True)] + [{}]
    ),
)  # fmt: skip


@given(config=CONFIGS, size=st.integers(4, 15), cut=st.integers(0, 25))
@settings(deadline=None, max_examples=60)
def test_rows_are_those_of_a_plain_loop_also_after_a_restore(config, size, cut):
    """Whatever the number of rows taken at once, and with outcomes that come a rollout late."""
    stream, loop, visits, late = stream_of(config, size), Loop(config, size, 4), [0] * size, []
    for step in range(30):
        if step == cut:
            state = json.loads(json.dumps(stream.state_dict()))
            stream = stream_of(config, size, seed=77)
            stream.load_state_dict(state)
            assert stream.state_dict() == state
        pieces = [stream.take(n) for n in ((4,), (1, 3), (2, 1, 1))[step % 3]]
        rows = np.concatenate(pieces).tolist()
        assert rows == [loop.next() for _ in range(4)]
        assert (stream.taken, stream.cursor) == (loop.taken, loop.position)
        if late and config.skip_epochs:
            outcomes = {}
            for row in late:
                count = passes(row, visits[row])
                visits[row] += 1
                loop.samples[row].append([1] * count + [0] * (GROUP - count))
                before = outcomes.get(row * 3 + 1, (0, 0))
                outcomes[row * 3 + 1] = before[0] + count, before[1] + GROUP
            if max(late.count(row) for row in late) > 1:
                for row in set(late):  # samples of one rollout are one visit
                    n = late.count(row)
                    loop.samples[row][-n:] = [[s for visit in loop.samples[row][-n:] for s in visit]]
            stream.observe(outcomes)
        late = rows


def test_rows_that_all_pass_or_fail_are_skipped_and_come_again():
    stream = stream_of(CurriculumConfig(skip_epochs=3), size=10, batch=10)
    stream.observe({1: (4, 4), 4: (0, 4), 7: (3, 4)})
    for _ in range(2):
        assert sorted(stream.take(3 * 8).tolist()) == sorted(3 * list(range(2, 10)))
        assert sorted(stream.take(10).tolist()) == list(range(10))
    assert list(stream.metrics().values()) == [12, 2, 1]  # skipped, gated, open


def test_where_all_rows_are_gated_epochs_pass_until_they_come_again():
    stream = stream_of(CurriculumConfig(skip_epochs=2), size=5, batch=5)
    stream.observe({int(i): (4, 4) for i in Prompts(5).ids})
    assert sorted(stream.take(5).tolist()) == list(range(5)) and stream.epoch == 3


def test_visits_are_in_proportion_to_learnability():
    stream = stream_of(CurriculumConfig(skip_epochs=9, learnability=True), size=5, batch=5)
    rates = {0: (4, 8), 1: (2, 8), 2: (7, 8), 3: (39, 40), 4: (8, 8)}
    stream.observe({3 * row + 1: counts for row, counts in rates.items()})
    rows, epochs = [], 400
    while stream.cursor < 5 * epochs:
        rows += stream.take(1).tolist()
    for row, (passed, samples) in rates.items():
        p = passed / samples
        assert abs(rows.count(row) - epochs * max(4 * p * (1 - p), 0.1)) <= 1


def test_rows_open_in_the_order_of_their_column():
    config = CurriculumConfig(column="n", steps=6)
    stream, values = stream_of(config, size=24, batch=2), np.sort(Prompts(24).values)
    for step in range(1, 8):
        taken, opened = stream.take(2), min(4 * step, 24)
        assert Prompts(24).values[taken].max() <= values[opened - 1]
        assert step > 5 or stream.metrics()["curriculum/open"] == min(4 * (step + 1), 24) / 24
    assert len(set(stream.take(48).tolist())) == 24


@given(weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=4), steps=st.integers(0, 20))
@settings(deadline=None, max_examples=25)
def test_shares_of_sources_stay_exact_and_resume(weights, steps):
    """At every prefix, whatever is skipped; a source whose rows are all gated keeps its share, too."""
    config = CurriculumConfig(column="n", steps=4, skip_epochs=2)

    def mixed():
        parts = {
            f"s{i}": stream_of(config, 7, 4, Fraction(w) / sum(map(Fraction, weights)), seed=i, prefix=f"data/s{i}")
            for i, w in enumerate(weights)
        }
        return MixedStream(parts, weights, 4)

    stream, rows, resumed = mixed(), [], None
    for step in range(30):
        if step == steps:
            resumed = mixed()
            resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        taken = stream.next()
        rows += taken.tolist()
        both = [stream] if resumed is None else [stream, resumed]
        if resumed is not None:
            np.testing.assert_array_equal(resumed.next(), taken)
        for one in both:
            for row in taken:
                name, inside = f"s{row // 7}", int(row % 7)
                one.streams[name].observe({inside * 3 + 1: (4 if row < 7 else passes(inside, step), GROUP)})
    counts = (np.array(rows)[:, None] // 7 == np.arange(len(weights))).cumsum(0)
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - shares * np.arange(1, len(rows) + 1)[:, None]).max() < 1 + 1e-9
    assert stream.metrics().keys() >= {"data/s0/epoch", "data/s0/skipped", "data/s1/gated", "data/s1/open"}


ROWS = [{"prompt": f"p{i}", "info": {"rate": i / 8}, "n": i} for i in range(9)]


def values_of(rows, **config):
    return column_values(prompt_rows(rows, DataConfig()), "data.train", CurriculumConfig(**config))


def test_rows_outside_the_bounds_are_left_out_and_counted(byte):
    values = values_of(ROWS, column="info.rate", bounds=[0.25, 0.5])
    data = PromptDataset(prompt_rows(ROWS, DataConfig()), byte, DataConfig(), values=values)
    assert [prompt.fields["n"] for prompt in data] == [prompt.id for prompt in data] == data.ids.tolist() == [2, 3, 4]
    assert data.values.tolist() == [0.25, 0.375, 0.5]
    assert str(data.report) == "data.train: 9 rows, 3 kept, 6 outside curriculum.bounds"


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        (ROWS, {"column": "rate", "steps": 2}, r"row 1: curriculum.column='rate': expected one of .*info, n"),
        (ROWS, {"column": "info.pass", "steps": 2}, r"curriculum.column='info.pass'.*`info` has rate"),
        (ROWS, {"column": "prompt", "steps": 2}, r"curriculum.column='prompt': expected one of the columns info, n"),
        ([*ROWS, {"prompt": "p", "n": "7"}], {"column": "n", "steps": 2}, r"row 10: expected a number .*found '7'"),
        ([{"prompt": "p", "n": True}], {"column": "n", "steps": 2}, r"expected a number in .*found True"),
        ([{"prompt": "p", "n": math.nan}], {"column": "n", "steps": 2}, r"expected a number in .*found nan"),
        (ROWS, {"column": "n", "bounds": [9, 12]}, r"n within curriculum.bounds=\[9, 12\], but all 9 rows .* 0 to 8"),
    ],
)  # fmt: skip
def test_a_column_without_numbers_and_bounds_without_rows_are_refused(rows, config, message):
    with pytest.raises(DataError, match=message):
        values_of(rows, **config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("column=n curriculum.bounds=[0.9,0.1]", r"curriculum.bounds=\[0.9, 0.1\]: expected two finite numbers"),
        ("column=n curriculum.bounds=[1]", r"curriculum.bounds=\[1.0\]: expected two finite numbers"),
        ("column=n curriculum.bounds=[0,inf]", r"curriculum.bounds=.*inf\]: expected two finite numbers"),
        ("skip_epochs=1 curriculum.pass_rates=[0.9,0.1]", r"pass_rates=\[0.9, 0.1\]: .*0 <= low < high <= 1"),
        ("skip_epochs=1 curriculum.pass_rates=[0.5,0.5]", r"curriculum.pass_rates"),
        ("skip_epochs=1 curriculum.pass_rates=[-1,1]", r"curriculum.pass_rates"),
        ("skip_epochs=1 curriculum.pass_rates=[]", r"curriculum.pass_rates"),
        ("skip_epochs=-1", r"curriculum.skip_epochs=-1"),
        ("skip_epochs=1 curriculum.attempts=0", r"curriculum.attempts=0"),
        ("column=n curriculum.steps=3 curriculum.first=easy", r"curriculum.first='easy': expected one of low, high"),
    ],
)
def test_bad_settings_are_refused_by_their_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(["stage=grpo", *f"curriculum.{overrides}".split()])


@pytest.mark.slow
@pytest.mark.multirank
def test_a_run_resumes_bit_for_bit_and_takes_the_same_prompts_on_two_ranks(ranks, tiny_data, tiny_runs, tmp_path):
    """Two sources with gates, of which some rows are still closed at the checkpoint."""
    rows = [{"prompt": f"say {c}:", "n": i % 7} for i, c in enumerate(stages.LETTERS)]
    stages.write_jsonl(tmp_path / "a.jsonl", rows[:14]), stages.write_jsonl(tmp_path / "b.jsonl", rows[14:])
    overrides = [f"data.sources=[{{path: {tmp_path / 'a.jsonl'}, weight: 3}}, {{path: {tmp_path / 'b.jsonl'}}}]"]
    overrides += ["data.train=''", "curriculum={column: n, bounds: [0, 5], steps: 4, skip_epochs: 1, attempts: 8}"]
    overrides += ["curriculum.learnability=true", "eval.full_score=0.25", "checkpoint.every=3"]

    def arguments(name, steps):
        run, start = tmp_path / name, f"model.init={tiny_runs['sft']}"
        return stages.overrides("grpo", tiny_data, run, start, f"run.steps={steps}", *overrides)

    whole, parts = (stages.run(arguments(name, steps)) for name, steps in (("whole", 6), ("parts", 3)))
    stages.run(arguments("parts", 6))
    assert not stages.differences(whole, parts) and stages.same_weights(whole, parts)
    last = stages.records(whole)[-1]
    assert last["data/a/share"] == 0.75 and last["data/a/skipped"] > 0 and last["data/a/gated"] > 0
    one, *_ = ranks.run(jobs.played, 1, arguments=arguments("one", 6))
    two = ranks.run(jobs.played, 2, arguments=arguments("two", 6))
    assert one.requests == {request for rank in two for request in rank.requests}
    for here, there in zip(stages.records(whole), stages.records(tmp_path / "two"), strict=True):
        counted = {name: value for name, value in here.items() if name.startswith("data/") and "reward" not in name}
        assert counted == {name: there[name] for name in counted}
