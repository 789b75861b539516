"""From prompts to a training batch: collation, request seeds, shares, minibatches, statistics, evaluation."""

import math
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.engines import Capabilities
from aligner.config.sections.algorithm import AlgorithmConfig, KLConfig, KLControllerConfig, OverlongConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.rewards import EvalConfig, RewardConfig, RewardFunctionConfig
from aligner.data.items import PreferenceItem, ScoredItem, SftItem
from aligner.engines.base import RolloutEngine
from aligner.errors import ConfigError, EngineError, RewardError
from aligner.megatron.model import Head
from aligner.ops.reduce import reduce_metrics
from aligner.ops.rl.advantages import gdpo, grpo
from aligner.ops.seeds import request_seed
from aligner.rewards.composite import RewardPipeline, Scores
from aligner.rewards.functions import FunctionReward, load_function
from aligner.rollout.collate import collate, join_generations
from aligner.rollout.evaluate import Evaluator, judge
from aligner.rollout.heldout import held_out_loss, pair_accuracy, score_statistics
from aligner.rollout.loss_inputs import (
    KLController,
    average,
    minibatches,
    row_keys,
    sample_rows,
    set_token_rewards,
    shuffle_within_groups,
)
from aligner.rollout.requests import Request, Requests
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.schedule import Schedule
from aligner.rollout.score import Scorer
from aligner.rollout.sharing import share
from aligner.rollout.source import RolloutSource
from aligner.rollout.statistics import compared, rollout_metrics, value_metrics
from aligner.types import STOP, Generations, Prompt, Sample, SamplingParams
from tests.clocks import times_up

PAD = 0


class Words:
    """A tokenizer of one letter for each token."""

    pad_token_id, bos_token_id = PAD, None

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(chr(96 + t) for t in row if t > 1 or not skip_special_tokens) for row in rows]


def make_prompts(n: int, seed: int = 0) -> list[Prompt]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (n,), generator=g).tolist()
    return [
        Prompt(10 * i, tuple(torch.randint(2, 20, (k,), generator=g).tolist()), f"p{i}") for i, k in enumerate(lengths)
    ]


def make_generations(n: int, width: int = 5, seed: int = 1, cut: bool = False) -> Generations:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (n,), generator=g)
    real = torch.arange(width)[None] < lengths[:, None]
    logprobs = -torch.rand(n, width, generator=g) * real
    return Generations(
        tokens=torch.randint(2, 20, (n, width), generator=g) * real,
        lengths=lengths,
        logprobs=logprobs,
        finish_reason=torch.randint(0, 2, (n,), generator=g),
        weight_version=7,
        full_logprobs=logprobs - 1.0 * real if cut else None,
        routing=torch.randint(0, 9, (n, width + 5, 2, 3), generator=g).to(torch.uint8) if cut else None,
    )


def make_samples(prompts, generations, group):
    """Of an engine that answers with these generations."""
    version = generations.weight_version
    fields = {"weight_version": version, "take_sums": dict, "no_routing": None}
    engine = SimpleNamespace(bridge=None, generate=lambda *_: generations, **fields)
    requests = [Request(i, prompt, list(range(group))) for i, prompt in enumerate(prompts)]
    return SampleGenerator(engine, Words(), SamplingParams(9), Peers(0, 1)).samples(requests, SamplingParams(9))


def make_rollout(prompts: int = 4, group: int = 3, seed: int = 1, first_slot: int = 0):
    actual, generations = make_prompts(prompts), make_generations(prompts * group, seed=seed)
    slots = torch.arange(first_slot, first_slot + prompts).repeat_interleave(group)
    rollout = collate(make_samples(actual, generations, group), generations, slots, PAD)
    g = torch.Generator().manual_seed(seed)
    rollout.rewards = torch.rand(prompts * group, generator=g)
    rollout.valid = torch.ones(prompts * group, dtype=torch.bool)
    return rollout


# --- collation


@pytest.mark.parametrize("cut", [False, True])
def test_collate_is_the_slow_loop(cut):
    prompts, generations, group = make_prompts(4), make_generations(12, cut=cut), 3
    samples = make_samples(prompts, generations, group)
    batch = collate(samples, generations, torch.arange(4).repeat_interleave(group), PAD)
    source = generations.full_logprobs if cut else generations.logprobs
    total = int(batch.lengths.max())
    assert batch.tokens.shape[1] == total
    assert torch.equal(batch.routing, generations.routing[:, :total]) if cut else batch.routing is None
    for i in range(12):
        prompt, n = prompts[i // group].tokens, int(generations.lengths[i])
        row = [*prompt, *generations.tokens[i, :n].tolist()]
        assert batch.tokens[i].tolist() == row + [PAD] * (batch.tokens.shape[1] - len(row))
        assert int(batch.lengths[i]) == len(row)
        for t in range(batch.tokens.shape[1]):
            k = t - len(prompt)
            inside = 0 <= k < n
            assert float(batch.response_mask[i, t]) == inside
            assert float(batch.rollout_logprobs[i, t]) == (float(source[i, k]) if inside else 0.0)
        sample = samples[i]
        assert (sample.prompt, sample.index, sample.weight_version) == (prompts[i // group], i % group, 7)
        assert (
            sample.tokens == tuple(row[len(prompt) :])
            and sample.response == Words().batch_decode([sample.tokens], True)[0]
        )
        assert sample.finished == (int(generations.finish_reason[i]) == STOP) == bool(batch.finished[i])
    assert batch.rewards.isnan().all() and not batch.valid.any()


def test_joined_generations_are_those_of_one_rank():
    whole = make_generations(10, width=6, cut=True)
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 10)):
        width = int(whole.lengths[rows].max())
        parts.append(
            Generations(
                whole.tokens[rows, :width],
                whole.lengths[rows],
                whole.logprobs[rows, :width],
                whole.finish_reason[rows],
                7,
                whole.full_logprobs[rows, :width],
                whole.routing[rows, : width + 5],
            )
        )
    joined = join_generations(parts)
    width = joined.tokens.shape[1]
    assert torch.equal(joined.tokens, whole.tokens[:, :width]) and torch.equal(
        joined.logprobs, whole.logprobs[:, :width]
    )
    assert torch.equal(joined.full_logprobs, whole.full_logprobs[:, :width])
    for row, (actual, wanted) in enumerate(zip(joined.routing, whole.routing, strict=True)):
        there = 5 + max(parts[0 if row < 3 else 1 if row < 4 else 2].lengths.tolist())  # columns that its part had
        assert torch.equal(actual[:there], wanted[:there]) and not actual[there:].any()
    assert torch.equal(joined.lengths, whole.lengths) and torch.equal(joined.finish_reason, whole.finish_reason)
    parts[1].weight_version = 6
    with pytest.raises(AssertionError, match=r"several weight versions.*\[6, 7\]"):
        join_generations(parts)


# --- who generates what, with which seed


@given(st.integers(0, 60), st.integers(1, 9))
def test_shares_are_a_balanced_partition(count, parts):
    slices = [share(count, parts, i) for i in range(parts)]
    assert [i for s in slices for i in range(count)[s]] == list(range(count))
    sizes = [s.stop - s.start for s in slices]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5))
def test_a_repeated_row_never_repeats_a_seed(rows, group):
    prompts = [Prompt(10 * i, (2,), "") for i in range(4)]
    made = Requests(prompts, None, group, len(rows), range(len(rows)), seed=1)
    half, rollouts = len(rows) // 2, []  # a rollout may be asked for in several rounds
    for step in (1, 2, 1):
        made.begin(step)
        dealt = made.made(range(half), rows[:half]) + made.made(range(half, len(rows)), rows[half:])
        assert [r.slot for r in dealt] == list(range(len(rows))) and [r.prompt.id // 10 for r in dealt] == rows
        rollouts.append([seed for request in dealt for seed in request.seeds])
    assert len({*rollouts[0], *rollouts[1]}) == 2 * len(rows) * group and rollouts[2] == rollouts[0]


@dataclass
class Peers:
    """What a rank knows of its place: a stand-in for a layout and its model-parallel group."""

    dp_rank: int
    data: int
    tensor_rank: int = 0
    tensor: int = 1

    @property
    def pgs(self):
        return self

    @property
    def mp(self):
        return self

    @property
    def peers(self):
        return self

    def size(self):
        return self.tensor

    def rank(self):
        return self.tensor_rank


class Recorder(RolloutEngine):
    """An engine that notes its requests."""

    weight_version = 7

    def generate(self, prompts, seeds, sampling, progress=None):
        self.requests = [(tuple(p), tuple(s)) for p, s in zip(prompts, seeds, strict=True)]
        return make_generations(sum(map(len, seeds)))


def requests(ranks: int, tensor: int, monkeypatch) -> list[tuple]:
    """All requests of rollout 3, in order, over ranks x tensor processes: 3 prompts in 8 slots, so they repeat."""
    from aligner.data.stream import IndexStream

    def alone(parts, mine, group):
        """What the other peers send is what this one has: it is not looked at."""
        parts[:] = [mine] * len(parts)

    monkeypatch.setattr(dist, "all_gather_object", alone)
    results = []
    for rank in range(ranks):
        for peer in range(tensor):
            engine = Recorder()
            stream, layout = IndexStream(3, 5, True, 8), Peers(rank, ranks, peer, tensor)
            own = range(8)[share(8, ranks, rank)]
            made = Requests(make_prompts(3), stream, 2, 8, own, seed=4)
            made.begin(3)
            taken = made.take(range(8))
            generator = SampleGenerator(engine, Words(), SamplingParams(5), layout)
            generator.advance([generator.fresh(request, request.slot) for request in taken])
            assert len(taken) == 8 // ranks and [request.slot for request in taken] == list(own)
            results += engine.requests
    return results


def test_requests_do_not_depend_on_the_layout(monkeypatch):
    alone = requests(1, 1, monkeypatch)
    seeds = [seed for _, row in alone for seed in row]
    assert len(alone) == 8 and len(set(seeds)) == 16
    assert requests(2, 1, monkeypatch) == requests(1, 3, monkeypatch) == requests(2, 2, monkeypatch) == alone


class Telling(Recorder):
    """An engine that tells of every other sample before it returns all."""

    can = Capabilities(tells_finished=True)

    def generate(self, prompts, seeds, sampling, progress=None):
        out, group = super().generate(prompts, seeds, sampling) or make_generations(sum(map(len, seeds))), len(seeds[0])
        for row in range(0, len(out.tokens), 2):
            tokens, logprobs = (column[row, : out.lengths[row]].tolist() for column in (out.tokens, out.logprobs))
            if self.finished is not None:
                self.finished(*divmod(row, group), tokens, logprobs, bool(out.finish_reason[row] == STOP))
        self.scored_before_return = self.wait()
        return out


def rolling(engine, rewards: RewardPipeline) -> RolloutSource:
    """Of rollouts of 4 groups of 2 samples of 3 prompts."""
    requests = Requests(make_prompts(3), None, 2, 4, range(4), seed=4)
    generator = SampleGenerator(engine, Words(), SamplingParams(5), Peers(0, 1))
    schedule = Schedule(0, 0, 9, requests, range(4), generator, lambda: 7, Peers(0, 1))
    return RolloutSource(None, requests, schedule, Scorer(rewards, Peers(0, 1)), AlgorithmConfig())


def scored_at_once(source, requests):
    return source.score(source.schedule.generate_now(requests, score=source.score.rewards.score_early))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("engine", [Telling, Recorder])
def test_samples_are_scored_while_others_are_generated(overlap, engine, world):
    """A function of single samples sees those that the engine tells of before `generate` returns; the scores are
    those of all samples at once."""
    seen, engine = [], engine()

    def letters(samples):
        seen.extend(samples)
        return [float(len(s.response)) + s.index / 10 + s.prompt.id for s in samples]

    def wait():
        deadline = time.monotonic() + 120
        while overlap and len(seen) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(seen)

    letters.per_sample = True
    engine.wait = wait
    rewards = RewardPipeline(
        [(FunctionReward(letters, "letters", {}, "key"), 1.0)], RewardConfig(workers=2, overlap=overlap)
    )
    source = rolling(engine, rewards)
    groups = scored_at_once(source, source.requests.made(range(4), [2, 0, 1, 2]))
    samples, early = groups.samples, overlap and isinstance(engine, Telling)
    if isinstance(engine, Telling):
        assert engine.scored_before_return == (4 if early else 0) and engine.finished is None
    assert len(seen) == 8 and sorted(map(repr, seen)) == sorted(map(repr, samples))
    assert groups.components == {"letters": letters(samples)}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_more_samples_without_a_score_than_allowed_stop_the_run(failing, world):
    """One of a rollout may fail, whatever the fraction: of 8 samples it is more than 2 %."""

    def outside(samples):
        return [math.nan if i < failing else 1.0 for i, _ in enumerate(samples)]

    outside.may_fail, outside.failure = True, lambda: "no answer"
    rewards = RewardPipeline([(FunctionReward(outside, "outside", {}, "key"), 1.0)], RewardConfig())
    source = rolling(Recorder(), rewards)
    requests = source.requests.made(range(4), [2, 0, 1, 2])
    if failing < 2:
        assert (
            rewards.combine(scored_at_once(source, requests).components, 8, update=False).valid.count(False) == failing
        )
        return
    with pytest.raises(RewardError, match=r"2 of 8 samples.*reward.max_invalid_fraction=0.02.*`outside`: no answer"):
        scored_at_once(source, requests)


def test_what_was_begun_for_a_generation_that_failed_is_not_scored(world):
    """The sample in a worker's hands is finished, the others are never asked for."""
    seen, go = [], threading.Event()

    def slow(samples):
        seen.extend(samples)
        assert go.wait(120)
        return [0.0] * len(samples)

    def fail():
        deadline = time.monotonic() + 120
        while not seen and time.monotonic() < deadline:
            time.sleep(0.001)
        raise EngineError("out of memory")

    slow.per_sample = True
    engine = Telling()
    engine.wait = fail
    rewards = RewardPipeline([(FunctionReward(slow, "slow", {}, "key"), 1.0)], RewardConfig(workers=1))
    source = rolling(engine, rewards)
    with pytest.raises(EngineError, match="out of memory"):
        scored_at_once(source, source.requests.made(range(4), [2, 0, 1, 2]))
    go.set()
    rewards.score_early(seen[0])["slow"].result(120)  # the one worker has come to what was asked for last
    assert len(seen) == 2 and engine.finished is None


# --- rewards, minibatches, the KL coefficient


def test_token_rewards_and_loss_mask():
    rollout = make_rollout()
    rollout.finished = torch.arange(12) % 2 == 0
    rollout.valid[4] = False
    rollout.rewards[4] = math.nan
    rollout.old_logprobs, rollout.ref_logprobs = rollout.rollout_logprobs, rollout.rollout_logprobs - 0.25
    kl = KLConfig(0.1, "k1", "reward")
    set_token_rewards(rollout, AlgorithmConfig(kl=kl, overlong=OverlongConfig(True, 0.5)), 0.2, 5)
    for i in range(12):
        score = 0.0 if i == 4 else float(rollout.rewards[i])
        score -= 0.0 if rollout.finished[i] else 0.5
        tokens = int(rollout.response_mask[i].sum())
        assert float(rollout.token_rewards[i].sum()) == pytest.approx(score - 0.2 * 0.25 * tokens, abs=1e-5)
        assert float(rollout.token_rewards[i, rollout.lengths[i] - 1]) == pytest.approx(score - 0.05, abs=1e-5)
        learns = bool(rollout.finished[i]) and i != 4
        assert torch.equal(rollout.loss_mask[i], rollout.response_mask[i] * learns)
    set_token_rewards(rollout, AlgorithmConfig(kl=KLConfig(0.1, "k1", "loss")), 0.2, 5)
    assert float(rollout.token_rewards[0].sum()) == pytest.approx(
        float(rollout.rewards[0])
    )  # in the loss, not here too


def test_shuffling_keeps_each_groups_rewards():
    rollout = make_rollout(prompts=6, group=8)
    before, scores = rollout.rewards.clone(), scored(rollout)
    shuffle_within_groups(rollout, scores, 3)
    assert scores.components["a"] == rollout.rewards.tolist()  # the components go with the rewards
    assert not torch.equal(before, rollout.rewards)
    assert torch.equal(before.view(6, 8).sort().values, rollout.rewards.view(6, 8).sort().values)
    again = make_rollout(prompts=6, group=8)
    shuffle_within_groups(again, scored(again), 3)
    assert torch.equal(again.rewards, rollout.rewards)


@pytest.mark.parametrize(
    ("prompts", "group", "n", "rows"),
    [(6, 8, 4, [0, 1, 24, 25]), (6, 8, 3, [0, 1, 24]), (5, 1, 3, [0, 1, 3]), (2, 4, 9, [0, 1, 4, 5]), (3, 2, 0, [])],
)
def test_samples_for_people_are_of_several_groups(prompts, group, n, rows):
    rollout = make_rollout(prompts=prompts, group=group)
    scores = scored(rollout)
    shown = sample_rows(rollout, scores, n)
    assert [row.response for row in shown] == [rollout.samples[i].response for i in rows]
    assert [row.scores for row in shown] == [{name: v[i] for name, v in scores.components.items()} for i in rows]
    assert [row.columns for row in shown] == [dict(rollout.samples[i].prompt.fields) for i in rows]


def stay(minibatch):
    """In place of a balancer: every row stays on its rank."""
    return minibatch


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(8, 3, 6), (8, 4, 8), (4, 2, 2), (16, 1, 4), (8, 4, 0)]), st.integers(0, 3), st.integers(0, 99))
def test_minibatches_hold_every_row_once_for_any_number_of_ranks(shape, epoch, seed):
    prompts, group, size = shape
    batch = BatchConfig(prompts=prompts, group=group, minibatch_samples=size)
    rollout = make_rollout(prompts, group)
    rollout.loss_mask = rollout.response_mask
    rollout.tokens[:, 0] = torch.arange(prompts * group)  # a name for each row
    whole = [sorted(piece.tokens[:, 0].tolist()) for piece in minibatches(rollout, batch, seed, epoch, stay)]
    assert sorted(row for piece in whole for row in piece) == list(range(prompts * group))
    assert {len(piece) for piece in whole} == {size or prompts * group}
    halves = [
        rollout.select(torch.arange(prompts * group)[half]) for half in (share(prompts * group, 2, i) for i in (0, 1))
    ]
    parts = [list(minibatches(half, batch, seed, epoch, stay)) for half in halves]
    assert [sorted(a.tokens[:, 0].tolist() + b.tokens[:, 0].tolist()) for a, b in zip(*parts, strict=True)] == whole


def test_row_keys_name_a_sample_whatever_rank_it_is_on():
    rollout = make_rollout(prompts=4, group=3)
    keys = row_keys(rollout, 3, seed=5)
    rows = torch.tensor([9, 10, 11, 3, 4, 5])  # two groups, in another order
    assert torch.equal(row_keys(rollout.select(rows), 3, seed=5), keys[rows])
    assert (
        (keys >= 0).all()
        and keys.unique().numel() == 12
        and not set(keys.tolist()) & set(row_keys(rollout, 3, seed=6).tolist())
    )


def test_epochs_deal_anew():
    batch = BatchConfig(prompts=8, group=4, minibatch_samples=8)
    rollout = make_rollout(8, 4)
    rollout.loss_mask = rollout.response_mask
    rollout.tokens[:, 0] = torch.arange(32)
    dealt = [[p.tokens[:, 0].tolist() for p in minibatches(rollout, batch, 1, epoch, stay)] for epoch in range(3)]
    assert dealt[0] != dealt[1] != dealt[2] != dealt[0]


def test_average_of_minibatches():
    assert average([]) == {}
    assert average([{"a": 1.0, "b_max": 1.0}, {"a": 3.0, "b_max": 0.5}]) == {"a": 2.0, "b_max": 1.0}


def test_kl_controller_keeps_its_state():
    config = KLConfig(0.2, "k1", "reward", controller=KLControllerConfig("adaptive", target=1.0, horizon=100))
    kl = KLController(config)
    kl.update(5.0, 50)
    assert kl.coef == pytest.approx(0.2 * (1 + 0.2 * 0.5))
    other = KLController(config)
    other.load_state_dict(kl.state_dict())
    assert other.coef == kl.coef
    fixed = KLController(KLConfig(0.2, "k1", "reward"))
    fixed.update(5.0, 50)
    assert fixed.coef == 0.2


# --- statistics


def test_reduced_metrics_are_means_and_maxima():
    found = reduce_metrics({"a": (6.0, 4), "none": (0.0, 0.0)}, {"top": 3}, None)
    assert found["a"] == 1.5 and found["top"] == 3 and math.isnan(found["none"])


def scored(rollout):
    """Scores of two components, one of which does not apply to every sample."""
    first = [float(x) for x in rollout.rewards]
    second = [None if i % 3 else 1.0 for i in range(len(first))]

    class Fixed:
        main_thread = True

        def __init__(self, name):
            self.name = name

    pipeline = RewardPipeline([(Fixed("a"), 1.0), (Fixed("b"), 0.5)], RewardConfig())
    return pipeline.combine({"a": first, "b": second}, len(first), update=False)


def test_rollout_metrics_against_plain_statistics(world):
    rollout = make_rollout(prompts=4, group=3)
    rollout.rewards[:3] = 0.5  # a degenerate group
    scores = scored(rollout)
    rollout.rewards = torch.tensor(scores.total)
    rollout.rewards[:3] = 0.5
    g = torch.Generator().manual_seed(5)
    rollout.old_logprobs = rollout.rollout_logprobs + 0.1 * torch.randn(rollout.tokens.shape, generator=g)
    rollout.ref_logprobs = rollout.old_logprobs + 0.2 * torch.randn(rollout.tokens.shape, generator=g)
    rollout.loss_mask = rollout.response_mask
    rollout.advantages = torch.randn(rollout.tokens.shape, generator=g) * rollout.response_mask
    metrics = rollout_metrics(rollout, scores, AlgorithmConfig(), world)
    on, raw = rollout.response_mask.bool(), torch.tensor(scores.raw).double()
    d = (rollout.old_logprobs - rollout.ref_logprobs)[on].double()
    gap = (rollout.old_logprobs - rollout.rollout_logprobs)[on].double()
    lengths = rollout.response_mask.sum(1)
    wanted = {
        "reward/mean": raw.mean(),
        "reward/std": raw.std(unbiased=False),
        "reward/min": raw.min(),
        "reward/max": raw.max(),
        "reward/a/mean": sum(scores.components["a"]) / 12,
        "reward/b/mean": 1.0,
        "reward/b/std": 0.0,
        "reward/degenerate_groups": 0.25,
        "response/tokens_mean": lengths.mean(),
        "response/tokens_max": lengths.max(),
        "response/eos_fraction": rollout.finished.double().mean(),
        "response/truncated_fraction": 1 - rollout.finished.double().mean(),
        "advantage/mean": rollout.advantages[on].double().mean(),
        "advantage/std": rollout.advantages[on].double().std(unbiased=False),
        "kl/ref_k1": d.mean(),
        "kl/ref_k1_sequence_sum": d.sum() / 12,
        "kl/ref_k1_sequence_mean": ((rollout.old_logprobs - rollout.ref_logprobs) * on).sum(1).div(lengths).mean(),
        "kl/ref_k3": (torch.exp(-d) - 1 + d).mean(),
        "mismatch/logprob_abs_mean": gap.abs().mean(),
        "mismatch/logprob_abs_max": gap.abs().max(),
        "mismatch/token_mult_prob_error": gap.abs().exp().mean(),
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_groups_are_degenerate_by_what_advantages_compare(world):
    """Equal rewards, of which one is shaped: the group trains."""
    rollout = make_rollout(prompts=4, group=3)
    rollout.loss_mask = rollout.response_mask
    rollout.rewards[:] = 0.5
    rollout.token_rewards = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
    rollout.token_rewards[:, -1] = rollout.rewards
    rollout.token_rewards[4, -1] -= 1.0  # overlong
    scores = scored(rollout)
    assert rollout_metrics(rollout, scores, AlgorithmConfig(), world)["reward/degenerate_groups"] == 0.75
    assert int((grpo(rollout.token_rewards.sum(1), rollout.group, rollout.valid) != 0).sum()) == 3


def test_with_gdpo_groups_are_degenerate_in_every_component(world):
    """Groups 0 and 1 vary in components whose sums do not; the sum of group 3 does, by one that a single sample has."""
    rollout = make_rollout(prompts=4, group=3)
    rollout.loss_mask, algorithm = rollout.response_mask, AlgorithmConfig(advantage="gdpo")
    components = {
        "a": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, *[0.0] * 3, *[1.0] * 3],
        "b": [1.0, 0.0, 0.0, 1.0, 0.0, None, *[0.5] * 3, None, 1.0, None],
    }
    sums = [a + (b or 0) for a, b in zip(*components.values(), strict=True)]
    scores = Scores(sums, sums, components, [True] * 12, [False] * 12)
    rollout.rewards = torch.tensor(sums)
    assert rollout_metrics(rollout, scores, AlgorithmConfig(), world)["reward/degenerate_groups"] == 0.75
    assert rollout_metrics(rollout, scores, algorithm, world)["reward/degenerate_groups"] == 0.5
    actual = compared(rollout, scores, algorithm)
    assert actual[:2].tolist() == [[0.0, 1.0], [1.0, 0.0]] and actual[[5, 9, 11], 1].isnan().all()
    trained = gdpo(actual, [1.0, 1.0], rollout.group, rollout.valid).view(4, 3).any(1)
    assert trained.tolist() == [True, True, False, False]


def test_value_metrics_equal_a_plain_computation(world):
    rollout = make_rollout()
    g = torch.Generator().manual_seed(2)
    rollout.loss_mask = rollout.response_mask
    rollout.returns = torch.randn(rollout.tokens.shape, generator=g) * rollout.response_mask
    rollout.values = rollout.returns + 0.3 * torch.randn(rollout.tokens.shape, generator=g)
    metrics = value_metrics(rollout, world)
    r, v = (x[rollout.response_mask.bool()].double() for x in (rollout.returns, rollout.values))
    assert metrics["critic/return_mean"] == pytest.approx(float(r.mean()), abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(float(v.mean()), abs=1e-6)
    wanted = 1 - float((r - v).var(unbiased=False) / r.var(unbiased=False))
    assert metrics["critic/explained_variance"] == pytest.approx(wanted, abs=1e-6)


# --- evaluation


class Saying(RolloutEngine):
    """An engine that answers with these texts."""

    weight_version = 7

    def __init__(self, texts):
        self.rows = [[ord(letter) - 96 for letter in text] for text in texts]

    def generate(self, prompts, seeds, sampling, progress=None):
        tokens, lengths = torch.tensor(self.rows), torch.tensor([*map(len, self.rows)])
        return Generations(tokens, lengths, -torch.ones(tokens.shape), torch.full((len(tokens),), STOP), 7)


def pipeline(function, **config) -> RewardPipeline:
    function.name = "right"
    return RewardPipeline([(function, 2.0)], RewardConfig(**config))


def samples_of(texts: list[str], k: int) -> list[Sample]:
    return [Sample(Prompt(i // k, (2,), ""), i % k, text, (3,) * len(text), True) for i, text in enumerate(texts)]


def test_pass_at_k_is_any_of_the_k():
    samples = samples_of(["y", "n", "n", "n", "n", "y", "n", "n", "?"], 3)
    rewards = pipeline(lambda actual: [None if s.response == "?" else float(s.response == "y") for s in actual])
    verdict = judge(samples, rewards, EvalConfig(samples=3, temperature=1.0))
    assert verdict.correct == [s.response == "y" for s in samples]  # what nobody judges is not right
    assert verdict.means["eval/accuracy"] == (2.0, 9.0) and verdict.means["eval/pass_at_k"] == (2.0, 3.0)
    assert verdict.means["eval/reward"] == (4.0, 9.0) and verdict.totals[0] == 2.0
    assert "eval/pass_at_k" not in judge(samples, rewards, EvalConfig(samples=1)).means


def test_partial_credit_is_not_right():
    verdict = judge(
        samples_of(["ab", "a"], 1), pipeline(lambda actual: [len(s.response) / 2 for s in actual]), EvalConfig()
    )
    assert verdict.correct == [True, False] and verdict.means["eval/reward"] == (3.0, 2.0)


def scorers(**functions) -> RewardPipeline:
    return RewardPipeline([(FunctionReward(f, n, {}, "f"), 1.0) for n, f in functions.items()], RewardConfig())


def right(samples):
    return [None if s.response == "?" else float(s.response == "y") for s in samples]


def short(samples):
    return [-0.1 * len(s.response) for s in samples]


def test_means_are_told_of_each_function_where_it_applies():
    verdict = judge(samples_of(["y", "n", "?", "y"], 1), scorers(right=right, short=short), EvalConfig())
    assert verdict.means["eval/right/mean"] == (2.0, 3.0)
    assert verdict.means["eval/short/mean"] == (pytest.approx(-0.4), 4.0)


def test_a_function_that_cannot_give_full_score_says_nothing_of_what_is_right(monkeypatch):
    """A penalty beside a checker; without its `best_score` the accuracy is 0."""
    samples = samples_of(["y", "n", "y", "n"], 1)
    assert judge(samples, scorers(right=right, short=short), EvalConfig()).means["eval/accuracy"] == (0.0, 4.0)
    monkeypatch.setattr(short, "best_score", 0.0, raising=False)
    assert judge(samples, scorers(right=right, short=short), EvalConfig()).means["eval/accuracy"] == (2.0, 4.0)
    built_in = load_function(RewardFunctionConfig(path="length", args={"limit": 1}))
    rewards = RewardPipeline([(FunctionReward(right, "right", {}, "f"), 1.0), (built_in, 1.0)], RewardConfig())
    assert judge(samples, rewards, EvalConfig()).means["eval/accuracy"] == (2.0, 4.0)


@pytest.mark.parametrize(
    "functions, texts, words",
    [
        ({"right": right, "short": short}, ["y", "n"], "because `short` gave no answer eval.full_score=1"),
        ({"right": right, "short": short}, ["n", "n"], ""),  # nothing was right: that is the model's
        ({"right": right}, ["n", "n"], ""),
        ({"right": right, "also": right}, ["y", "n"], ""),
        ({"penalty": "length"}, ["y", "n"], "always 0: no function can give eval.full_score=1"),
    ],
)
def test_a_function_that_leaves_the_accuracy_at_zero_is_named_once(world, capsys, functions, texts, words):
    built_in = load_function(RewardFunctionConfig(path="length", args={"limit": 9}))
    rewards = RewardPipeline(
        [(built_in if f == "length" else FunctionReward(f, n, {}, "f"), 1.0) for n, f in functions.items()],
        RewardConfig(),
    )
    evaluator = Evaluator(
        SampleGenerator(Saying(texts), Words(), SamplingParams(5), Peers(0, 1)),
        lambda: None,
        make_prompts(2),
        rewards,
        SamplingParams(5),
        EvalConfig(),
        Peers(0, 1),
        seed=4,
    )
    evaluator()
    out = capsys.readouterr().out
    assert out.count("WARNING") == bool(words) and words in out
    evaluator()
    assert "WARNING" not in capsys.readouterr().out


def test_what_waited_behind_slow_answers_is_not_right(monkeypatch):
    release = threading.Event()

    def slow(found):
        return [1.0 if sample.response == "y" or release.wait(120) else 0.0 for sample in found]

    slow.per_sample, slow.late_score = True, 0.0
    times_up(monkeypatch, right={0: "done", 1: "running", 2: "waiting"})
    verdict = judge(samples_of(["y", "n", "y"], 1), pipeline(slow, workers=1), EvalConfig())
    release.set()
    assert verdict.correct == [True, False, False] and verdict.totals == [2.0, 0.0, 0.0]


def test_evaluator_generates_k_samples_with_seeds_of_its_own(world):
    engine, refits = Recorder(), []
    config = EvalConfig(prompts=3, samples=2, temperature=1.0)
    layout = Peers(0, 1)
    rewards = pipeline(lambda actual: [1.0] * len(actual))
    prompts = make_prompts(5)
    evaluator = Evaluator(
        SampleGenerator(engine, Words(), SamplingParams(5), layout),
        lambda: refits.append(1),
        prompts,
        rewards,
        SamplingParams(5),
        config,
        layout,
        seed=4,
    )
    evaluation = evaluator()
    assert refits == [1] and evaluation["eval/accuracy"] == evaluation["eval/pass_at_k"] == 1.0
    assert [p for p, _ in engine.requests] == [p.tokens for p in prompts[:3]]
    seeds = [s for _, row in engine.requests for s in row]
    assert len(set(seeds)) == 6
    training = {request_seed(4, step, p.id, i) for step in range(50) for p in prompts for i in range(8)}
    assert not training & set(seeds)


class SecondToken:
    """A reward model whose score is the row's second token."""

    @property
    def model(self):
        return self

    layout = None
    head = Head("score")
    exchanges = False

    def raw_scores(self, batch):
        return batch.tokens[:, 1:2].float()


def test_pair_accuracy_and_score_statistics(world):
    model = SecondToken()
    model.layout = Peers(0, 1)
    Peers.dp = property(lambda self: world)
    pairs = [PreferenceItem([9, a], [9, b, 5], 0.0) for a, b in ((4, 2), (3, 5), (8, 1), (2, 2))]
    actual = pair_accuracy(model, pairs, 0, True)
    # a tie is half right, as in the area under the ROC curve
    assert actual["eval/accuracy"] == 2.5 / 4 and actual["eval/margin"] == pytest.approx((2 - 2 + 7 + 0) / 4)
    assert actual["eval/loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in (2, -2, 7, 0)) / 4, rel=1e-5)
    assert pair_accuracy(model, pairs, 1, True)["eval/accuracy"] == 1.0
    scores = torch.tensor([4.0, 2, 3, 5, 8, 1, 2, 2])
    ((mean, std),) = score_statistics(model, pairs, True)
    assert (mean, std) == (pytest.approx(float(scores.mean())), pytest.approx(float(scores.std(unbiased=False))))
    answers = [ScoredItem([9, 4], (3.0,)), ScoredItem([9, 2], (2.0,))]
    assert pair_accuracy(model, answers, 0, False) == {"eval/loss": 0.5}


def test_held_out_loss_counts_the_answers_tokens(world):
    class Uniform:
        layout = Peers(0, 1)
        exchanges = False

        @property
        def model(self):
            return self

        def logprobs(self, batch, mask):
            return -batch.tokens.float()

    Peers.dp = property(lambda self: world)
    rows = [SftItem([5, 1, 2], [0, 1, 1]), SftItem([5, 4], [0, 1]), SftItem([5, 9], [0, 1])]
    assert held_out_loss(Uniform(), rows, 2)["eval/loss"] == pytest.approx((1 + 2 + 4) / 3)
    assert held_out_loss(Uniform(), rows, 0)["eval/loss"] == pytest.approx((1 + 2 + 4 + 9) / 4)


def test_ranks_that_exchange_tokens_all_need_a_held_out_row():
    model = SecondToken()
    Peers.expert = 2
    model.layout, model.exchanges = Peers(0, 4), True
    pairs = [PreferenceItem([9, 1], [9, 2], 0.0)] * 3
    with pytest.raises(ConfigError, match=r"parallel.expert.*3 rows for 4 ranks"):
        pair_accuracy(model, pairs, 0, True)
