"""Rows of several sources in fixed shares: exact at every prefix, the same for any layout and after a restore."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.builders.data import packing_line
from aligner.config.resolve import compose
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.data import DataConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.config.validate import validate
from aligner.data.batches import BatchSource
from aligner.data.collate import collate_sft
from aligner.data.dataset import PromptDataset, SftDataset
from aligner.data.formats import prompt_rows, sft_rows
from aligner.data.mixture import Mixture, PromptMixture
from aligner.data.stream import IndexStream, MixedStream
from aligner.errors import CheckpointError, ConfigError, DataError
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import FunctionReward
from aligner.rollout.outcomes import Outcomes
from aligner.types import Sample
from tests import stages

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def mixed(weights, sizes=None, batch=1, seed=3):
    sizes = sizes or [7] * len(weights)
    streams = {f"s{i}": IndexStream(size, seed + i) for i, size in enumerate(sizes)}
    return MixedStream(streams, weights, batch)


@given(weights=WEIGHTS)
@settings(deadline=None, max_examples=60)
def test_every_prefix_has_the_shares_rounded_up_or_down(weights):
    rows = mixed(weights).take(300) // 7
    shares = np.array(weights) / sum(weights)
    counts = (rows[:, None] == np.arange(len(weights))).cumsum(0)
    assert np.abs(counts - shares * np.arange(1, 301)[:, None]).max() < 1 + 1e-9


def test_whole_numbers_come_out_exactly():
    rows = mixed([3, 1, 4]).take(80) // 7
    for start in range(0, 80, 8):
        assert np.bincount(rows[start : start + 8]).tolist() == [3, 1, 4]


@given(weights=WEIGHTS, batch=st.integers(1, 9), steps=st.integers(0, 6))
@settings(deadline=None, max_examples=30)
def test_the_same_rows_after_a_restore_and_for_other_batches(weights, batch, steps):
    stream, whole = mixed(weights, batch=batch), mixed(weights).take(batch * (steps + 4))
    before = [stream.next() for _ in range(steps)]
    resumed = mixed(weights, batch=batch)
    resumed.load_state_dict(stream.state_dict())
    after = [resumed.next() for _ in range(4)]
    np.testing.assert_array_equal(np.concatenate([*before, *after]), whole)


def test_each_source_is_shuffled_anew_in_each_of_its_own_epochs():
    stream = mixed([1, 3], sizes=[4, 6])
    rows = stream.take(64)
    small, large = rows[rows < 4].reshape(4, 4), rows[rows >= 4].reshape(8, 6) - 4
    for epochs in (small, large):
        assert all(sorted(epoch) == list(range(epochs.shape[1])) for epoch in epochs.tolist())
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    assert stream.metrics() == {"data/s0/epoch": 4.0, "data/s1/epoch": 8.0}
    alone = IndexStream(6, 4)  # seed + 1, as `mixed` gives it: the order does not know of the other source
    np.testing.assert_array_equal(large.flatten(), alone.take(48))


def test_other_sources_or_sizes_are_refused():
    state = mixed([1, 1]).state_dict()
    with pytest.raises(CheckpointError, match=r"data.sources: expected the checkpoint's s0, s1, found s0"):
        mixed([1]).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"of 7 rows, found 5 rows"):
        mixed([1, 1], sizes=[7, 5]).load_state_dict(state)


def make(byte, kind=SftDataset, typed=sft_rows, **rows):
    return {name: kind(typed(part, DataConfig()), byte, DataConfig()) for name, part in rows.items()}


def test_rows_are_numbered_through_the_sources_for_any_number_of_ranks(byte):
    rows = [{"prompt": "p", "completion": "x" * (i + 1)} for i in range(9)]
    parts = make(byte, a=rows[:5], b=rows[5:])
    data = Mixture(parts, [1, 1])
    assert [item.tokens.tolist() for item in data] == [i.tokens.tolist() for p in parts.values() for i in p]
    assert len(data) == 9 and data.lengths.tolist() == list(range(3, 12)) and data[-1].tokens.size == 11

    def batch(rank, ranks):
        streams = {name: IndexStream(len(chunk), 0) for name, chunk in parts.items()}
        stream = MixedStream(streams, [1, 1], 4)
        source = BatchSource(data, stream, collate_sft, 0, rank, ranks, lambda lengths: lengths.double())
        return [n for _ in range(5) for n in source.next().lengths.tolist()], source.metrics()

    whole, metrics = batch(0, 1)
    halves = [batch(rank, 2)[0] for rank in range(2)]
    assert sorted(whole) == sorted(halves[0] + halves[1]) and metrics["data/a/epoch"] == 2.0


@pytest.mark.parametrize("sources", [1, 2])
def test_the_share_of_rows_that_lost_their_end_is_of_the_whole_step(byte, sources):
    """Against a loop over the rows of each step, of which odd lengths are cut."""
    texts = [
        [{"prompt": "p", "completion": "x" * n} for n in lengths]
        for lengths in ([3, 30, 4, 3, 40], [9, 50, 8, 2, 1, 5])
    ]
    cut = DataConfig(max_tokens=8, overlong="truncate")
    parts = {name: SftDataset(sft_rows(rows, cut), byte, cut) for name, rows in zip("ab", texts, strict=True)}
    data = Mixture(parts, [2, 1]) if sources == 2 else parts["b"]
    lost = [n > 6 for rows in (texts if sources == 2 else texts[1:]) for n in (len(row["completion"]) for row in rows)]

    def steps(rank, ranks):
        order = [IndexStream(len(rows), 0, True, 4) for rows in parts.values()]
        stream = MixedStream(dict(zip("ab", order, strict=True)), [2, 1], 4) if sources == 2 else order[1]
        source = BatchSource(data, stream, collate_sft, 0, rank, ranks, lambda lengths: lengths.double())
        return [source.next() and source.metrics()["batch/truncated_fraction"] for _ in range(6)]

    stream = [IndexStream(len(rows), 0, True, 4) for rows in parts.values()]
    stream = MixedStream(dict(zip("ab", stream, strict=True)), [2, 1], 4) if sources == 2 else stream[1]
    expected = [sum(lost[row] for row in stream.next()) / 4 for _ in range(6)]
    assert steps(0, 1) == steps(1, 2) == expected and len(set(expected)) > 1


@pytest.mark.parametrize("by_tokens", [False, True])
def test_what_packing_makes_of_a_step_is_told_before_it(byte, by_tokens):
    """Against the rows of many steps: tokens of a step, and micro-batches of 300."""
    parts = make(byte, a=[{"prompt": "p", "completion": "x" * n} for n in (4, 9, 6)], b=[SHORT, SHORT])
    data, weights = Mixture(parts, [3, 1]), [3, 1]
    streams = {name: IndexStream(len(rows), 0) for name, rows in parts.items()}
    lengths = [rows.lengths for rows in parts.values()] if by_tokens else None
    rows = MixedStream(streams, weights, 1, lengths=lengths).take(6000)
    mean = data.lengths[rows].mean()
    line = packing_line(data, BatchConfig(sequences=64, micro_batch_tokens=300), 2, by_tokens)
    assert line == (
        f"packing: {mean:.0f} tokens for each of batch.sequences=64, at most 11; about 1 micro-batch of 300 tokens on "
        f"a data-parallel rank, {32 * mean / 300:.0%} full"
    )
    by_rows = packing_line(data, BatchConfig(sequences=64, micro_batch_samples=4), 2, by_tokens)
    assert by_rows.endswith("; 4 of them in a micro-batch")
    assert packing_line(parts["b"], BatchConfig(), 1, by_tokens).startswith("packing: 3 tokens for each")


SHORT = {"prompt": "p", "completion": "x"}


def test_prompts_keep_different_ids_and_get_each_others_columns(byte):
    parts = make(byte, PromptDataset, prompt_rows, a=[{"prompt": "p", "n": 1}] * 2, b=[{"prompt": "q", "m": 2}])
    data = PromptMixture(parts, [1, 1])
    assert [prompt.id for prompt in data] == [0, 1, 2] and data.where(2) == "row 1"
    assert [data.origin(prompt) for prompt in data] == [("a", 0), ("a", 1), ("b", 0)]
    assert [prompt.fields for prompt in data] == [{"n": 1, "m": None}] * 2 + [{"n": None, "m": 2}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[{path: %(a)s, weight: -1}]", r"data.sources\[\].weight=-1.0: expected a finite number > 0"),
        ("[{path: %(a)s, weight: 0}]", r"data.sources\[\].weight=0.0: expected .*leave out a source"),
        ("[{path: %(a)s, weight: .nan}]", r"data.sources.*weight=.*nan"),
        ("[{path: %(a)s, weight: .inf}]", r"data.sources.*weight=.*inf"),
        ("[{path: %(a)s, weight: much}]", r"data.sources.*weight"),
        ("[{weight: 1}]", r"data.sources\[\].path=''"),
        ("[{path: %(a)s}, {path: %(a)s}]", r"data.sources\[\].name='a': expected another name for each source"),
        ("[{path: %(a)s, name: a/b}]", r"data.sources\[\].name='a/b': expected letters"),
        ("[{path: %(a)s, format: odd}]", r"data.sources\[\].format='odd'"),
        ("[{path: %(a)s, colour: red}]", r"colour"),
        ("[{path: absent.jsonl}]", r"data.sources.absent.path='absent.jsonl': expected a path that exists"),
    ],
)
def test_bad_sources_are_refused_in_one_line(tmp_path, change, message):
    stages.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c"}])
    value = change % {"a": tmp_path / "a.jsonl"}
    with pytest.raises(ConfigError, match=message) as caught:
        validate(compose(["stage=sft", f"data.sources={value}", f"model.tokenizer={tmp_path}"]), 1)
    assert "\n" not in str(caught.value).strip()


def test_one_of_the_two():
    with pytest.raises(ConfigError, match=r"data.train='x.jsonl': expected empty with data.sources"):
        DataConfig(train="x.jsonl", sources=[compose(["data.sources=[{path: a}]"]).data.sources[0]])
    with pytest.raises(ConfigError, match=r"data.train='': .*data.sources"):
        validate(compose(["stage=sft"]), 1)


@pytest.fixture
def sources(tiny_data, tmp_path):
    """The task of `tests.stages` in two files of other columns, a third of the rows from the second."""
    rows = [{"prompt": f"say {c}:", "completion": c} for c in stages.LETTERS]
    stages.write_jsonl(tmp_path / "first.jsonl", rows[:20])
    stages.write_jsonl(tmp_path / "other.jsonl", [{"q": r["prompt"], "completion": r["completion"]} for r in rows[20:]])
    second = f"{{path: {tmp_path / 'other.jsonl'}, name: b, columns: {{prompt: q}}}}"
    return [f"data.sources=[{{path: {tmp_path / 'first.jsonl'}, weight: 2}}, {second}]", "data.train=''"]


@pytest.mark.slow
def test_a_stage_on_sources_goes_on_as_if_it_had_never_stopped(tiny_data, sources, tmp_path, capsys):
    overrides = sources
    whole = stages.stage("sft", tiny_data, tmp_path / "whole", "run.steps=4", *overrides)
    stages.stage("sft", tiny_data, tmp_path / "parts", "run.steps=2", *overrides)
    parts = stages.stage("sft", tiny_data, tmp_path / "parts", "run.steps=4", *overrides)
    assert stages.same_weights(whole, parts) and not stages.differences(whole, parts)
    last = stages.records(whole)[-1]
    taken = [20 * last["data/first/epoch"], 12 * last["data/b/epoch"]]
    assert sum(taken) == pytest.approx(64) and taken[0] == pytest.approx(64 * 2 / 3, abs=1)
    capsys.readouterr()
    moved = [text.replace("other.jsonl", "moved.jsonl") for text in overrides]
    (tmp_path / "other.jsonl").rename(tmp_path / "moved.jsonl")
    stages.stage("sft", tiny_data, tmp_path / "parts", "run.steps=5", *moved)
    assert "resumed at step 4" in capsys.readouterr().out
    reweighted = [text.replace("weight: 2", "weight: 1") for text in moved]
    with pytest.raises(CheckpointError, match=r"data.sources is .*run.accept_changes"):
        stages.stage("sft", tiny_data, tmp_path / "parts", "run.steps=6", *reweighted)
    (tmp_path / "first.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"data.sources.first=.*the dataset is empty"):
        stages.stage("sft", tiny_data, tmp_path / "parts", "run.steps=6", *moved)


def test_grpo_reports_epochs_rewards_and_passes_of_each_source(tiny_data, sources, tmp_path):
    run = stages.stage("grpo", tiny_data, tmp_path / "grpo", "run.steps=3", "eval.full_score=0.25", *sources)
    for step, record in enumerate(stages.records(run), start=1):
        assert 20 * record["data/first/epoch"] + 12 * record["data/b/epoch"] == pytest.approx(8 * step)
        shares = [record["data/first/share"], record["data/b/share"]]
        assert sum(shares) == 1 and abs(8 * shares[0] - 16 / 3) < 1
        means = [record["data/first/reward_mean"], record["data/b/reward_mean"]]
        assert np.dot(shares, means) == pytest.approx(record["reward/mean"])
        assert all(0 <= record[f"data/{name}/pass_rate"] <= 1 for name in ("first", "b"))


def test_outcomes_of_each_source_are_those_of_a_plain_loop(byte):
    """Passes are by the function that can give full score, of valid samples; a penalty does not count."""
    parts = make(byte, PromptDataset, prompt_rows, a=[{"prompt": "p"}] * 3, b=[{"prompt": "q"}] * 2)
    data = PromptMixture(parts, [1, 1])
    says, short = "yynyn?nyn", FunctionReward(lambda samples: [-0.5] * len(samples), "short", {}, "f")
    short.best_score = 0.0
    right = FunctionReward(lambda of: [{"y": 1.0, "n": 0.25, "?": None}[s.response] for s in of], "right", {}, "f")
    rewards = RewardPipeline([(right, 2.0), (short, 1.0)], RewardConfig())
    samples = [Sample(data[i % 4], i // 4, text, (3,), True) for i, text in enumerate(says)]
    components = rewards.functions(samples)
    components["right"][0] = math.nan  # it could not be scored
    scores = rewards.combine(components, len(samples), update=False)
    metrics = Outcomes(data, rewards, 1.0).metrics(samples, scores)
    for name, rows in (("a", (0, 1, 2)), ("b", (3,))):
        own = [i for i in range(len(says)) if i % 4 in rows]
        valid = [i for i in own if i]
        totals = [{"y": 2.0, "n": 0.5, "?": 0.0}[says[i]] - 0.5 for i in valid]
        assert metrics[f"data/{name}/share"] == len(own) / len(says)
        assert metrics[f"data/{name}/reward_mean"] == pytest.approx(sum(totals) / len(valid))
        assert metrics[f"data/{name}/pass_rate"] == sum(says[i] == "y" for i in valid) / len(valid)
    assert math.isnan(Outcomes(data, rewards, 1.0).metrics(samples[:3], scores)["data/b/pass_rate"])


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_pair_stages_report_epochs_of_each_source(tiny_data, tmp_path, stage):
    value = f"[{{path: {tiny_data / 'pairs.jsonl'}, name: x}}, {{path: {tiny_data / 'pairs.jsonl'}, name: y}}]"
    run = stages.stage(stage, tiny_data, tmp_path / stage, "run.steps=1", f"data.sources={value}", "data.train=''")
    assert stages.records(run)[0]["data/x/epoch"] == stages.records(run)[0]["data/y/epoch"] == 4 / 32


@given(weights=WEIGHTS, longest=st.integers(1, 400), steps=st.integers(0, 40))
@settings(deadline=None, max_examples=40)
def test_shares_of_tokens_are_kept_at_every_prefix_and_after_a_restore(weights, longest, steps):
    """However long the rows of a source are: the last one's are up to `longest` times those of the others."""
    sizes = [5 + i for i in range(len(weights))]
    draw = np.random.default_rng(longest)
    lengths = [draw.integers(1, 4, size) for size in sizes]
    lengths[-1] = lengths[-1] * longest

    def stream():
        parts = {f"s{i}": IndexStream(size, i) for i, size in enumerate(sizes)}
        return MixedStream(parts, weights, 1, lengths=lengths)

    rows, every = stream().take(200), np.concatenate(lengths)
    source = np.searchsorted(np.cumsum(sizes), rows, side="right")
    taken = ((source[:, None] == np.arange(len(sizes))) * every[rows][:, None]).cumsum(0)
    shares = np.array(weights) / sum(weights)
    bound = sum(int(piece.max()) for piece in lengths)
    assert np.abs(taken - shares * taken.sum(1, keepdims=True)).max() <= bound
    first, second = stream(), stream()
    first.take(steps)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(second.take(50), rows[steps : steps + 50])
