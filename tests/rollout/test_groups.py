"""Dynamic sampling and greedy baselines: a rollout source over a fake engine, on one rank and on two."""

import hashlib
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.algorithm import AlgorithmConfig, OverlongConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.data.stream import IndexStream
from aligner.engines.base import RolloutEngine
from aligner.errors import RewardError
from aligner.ops.reduce import sum_over
from aligner.ops.seeds import request_seed
from aligner.rewards.composite import RewardPipeline
from aligner.rollout.groups import GroupFilter
from aligner.rollout.requests import Requests
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.schedule import Schedule
from aligner.rollout.score import Scorer
from aligner.rollout.sharing import share
from aligner.rollout.source import RolloutSource, Weights
from aligner.types import LENGTH, STOP, Generations, Prompt, SamplingParams
from tests.rollout.test_rollout import Words

PROMPTS, GROUP, ROWS, LIMIT = 8, 3, 20, 4


def digit(prompt, seed, n: int) -> int:
    """A number that follows from prompt and seed."""
    return hashlib.blake2b(repr((tuple(prompt), seed)).encode()).digest()[0] % n


class FakeEngine(RolloutEngine):
    """Answers 1 to LIMIT tokens, the last of them 2 (right) for one seed in four."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, seeds, sampling, progress=None):
        self.calls.append((list(prompts), list(seeds), sampling))
        rows = [answer(p, s) for p, ss in zip(prompts, seeds, strict=True) for s in ss]
        tokens = torch.zeros(len(rows), LIMIT, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        reasons = torch.where(lengths < LIMIT, STOP, LENGTH)
        return Generations(tokens, lengths, -tokens.float(), reasons, 5)


def answer(prompt, seed) -> list[int]:
    last = 2 if digit(prompt, seed, 4) == 0 else 3
    return [4] * digit(prompt, seed + 1, LIMIT) + [last]


class Right:
    """1 for a right answer, None (not applicable) for prompts of one token."""

    name, main_thread = "right", False

    def __call__(self, samples):
        return [None if len(s.prompt.tokens) == 1 else float(s.tokens[-1] == 2) for s in samples]


class Each:
    """A reward of each sample's own."""

    main_thread = False

    def __init__(self, name, score):
        self.name, self.score = name, score

    def __call__(self, samples):
        return [self.score(sample) for sample in samples]


def make_source(world: int = 1, rank: int = 0, **algorithm) -> RolloutSource:
    prompts = [Prompt(i, tuple(range(2, 3 + (i % 5))), f"p{i}") for i in range(ROWS)]
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    refit = lambda: {}  # noqa: E731 (a function that can carry an attribute)
    refit.model = SimpleNamespace(step_count=5)
    own = range(PROMPTS)[share(PROMPTS, world, rank)]
    requests = Requests(prompts, IndexStream(ROWS, 1, True, PROMPTS), GROUP, PROMPTS, own, seed=7)
    generator = SampleGenerator(FakeEngine(), Words(), SamplingParams(LIMIT), alone)
    return RolloutSource(
        Weights(refit, SimpleNamespace(check=lambda: {})),
        requests,
        Schedule(0, 0, 99, requests, own, generator, lambda: 5, alone),
        Scorer(RewardPipeline([(Right(), 2.0)], RewardConfig()), alone),
        AlgorithmConfig(**algorithm),
        dist.group.WORLD,
    )


def filtered(steps: int = 3):
    """The job of a rank: some rollouts with dynamic sampling."""
    source = make_source(dist.get_world_size(), dist.get_rank(), filter_groups=True)
    out = []
    for step in range(1, steps + 1):
        rollout, metrics, scores = source.next(step)
        out.append(
            (rollout.tensors(), metrics, scores, [s.prompt.id for s in rollout.samples], source.requests.stream.cursor)
        )
    return out


def simulate(steps: int):
    """Dynamic sampling by its definition: [(prompt of each slot, cursor, generated, dropped)] of each step."""
    source = make_source()
    stream, out = source.requests.stream, []
    for step in range(1, steps + 1):
        slots, seen, generated, dropped = [None] * PROMPTS, {}, 0, 0
        while None in slots:
            holes = [i for i, s in enumerate(slots) if s is None]
            filled = {}
            for _ in range(PROMPTS // len(holes)):
                for slot in holes:
                    row = int(stream.take(1)[0])
                    first, seen[row] = seen.get(row, 0) * GROUP, seen.get(row, 0) + 1
                    prompt = source.requests.prompts[row]
                    rewards = {
                        answer(prompt.tokens, request_seed(7, step, row, first + i))[-1] == 2 for i in range(GROUP)
                    }
                    good = len(rewards) == 2 and len(prompt.tokens) > 1
                    generated, dropped = generated + 1, dropped + (not good)
                    if good:
                        filled.setdefault(slot, row)
            for slot, row in filled.items():
                slots[slot] = row
        out.append((slots, stream.cursor, generated, dropped))
    return out


def test_every_slot_gets_a_group_with_different_rewards(world):
    for (tensors, metrics, scores, ids, cursor), want in zip(filtered(), simulate(3), strict=True):
        slots, end, generated, dropped = want
        assert ids == [row for row in slots for _ in range(GROUP)] and cursor == end
        assert tensors["group"].tolist() == [slot for slot in range(PROMPTS) for _ in range(GROUP)]
        assert all(len(set(r)) == 2 for r in tensors["rewards"].view(PROMPTS, GROUP).tolist())
        assert tensors["valid"].all() and scores.total == tensors["rewards"].tolist()
        assert (metrics["filter/generated_prompts"], metrics["filter/dropped_prompts"]) == (generated, dropped)
        assert metrics["filter/surplus_prompts"] == generated - dropped - PROMPTS
        assert metrics["filter/rounds"] > 1 and 0.3 < metrics["filter/reward_mean"] < 0.8  # a quarter of 2.0


@pytest.mark.multirank
def test_two_ranks_fill_the_same_slots_with_the_same_samples(ranks, world):
    alone = filtered()
    pair = ranks.run(filtered, world=2)
    for step, (tensors, metrics, scores, ids, cursor) in enumerate(alone):
        parts = [rank[step] for rank in pair]
        for name, want in tensors.items():
            halves = [piece[0][name] for piece in parts]
            if want.dim() == 2:
                halves = [torch.nn.functional.pad(x, (0, want.shape[1] - x.shape[1])) for x in halves]
            assert torch.equal(torch.cat(halves), want), name
        assert [i for piece in parts for i in piece[3]] == ids and {piece[4] for piece in parts} == {cursor}
        assert all(piece[1] == metrics for piece in parts)
        assert [v for piece in parts for v in piece[2].total] == scores.total
        assert [len(piece[3]) for piece in parts] == [PROMPTS // 2 * GROUP] * 2


def test_a_saved_cursor_resumes_with_the_same_rollout(world):
    source, other = make_source(filter_groups=True), make_source(filter_groups=True)
    source.next(1)
    other.requests.stream.load_state_dict(source.requests.stream.state_dict())
    a, b = source.next(2)[0], other.next(2)[0]
    assert torch.equal(a.tokens, b.tokens) and source.requests.stream.cursor == other.requests.stream.cursor


def test_too_many_rounds_are_an_error_that_says_what_to_change(world):
    source = make_source(filter_groups=True, filter_rounds=1)
    with pytest.raises(RewardError, match=r"algorithm\.filter_rounds=1 .* of 8 prompts .*batch\.group"):
        source.next(1)
    hopeless = make_source(filter_groups=True, filter_rounds=4)
    hopeless.requests.prompts = [Prompt(i, (2,), "") for i in range(ROWS)]  # no score at all
    with pytest.raises(RewardError, match=r"8 of 8 prompts .* 32 of 32 generated groups were all equal or invalid"):
        hopeless.next(1)


def test_refill_keeps_the_first_good_group_of_a_slot():
    group_filter = GroupFilter(prompts=6, group=2, rounds_allowed=3)
    assert group_filter.wanted() == [0, 1, 2, 3, 4, 5]
    group_filter.open = [1, 4]
    assert group_filter.wanted() == [1, 4] * 3  # no more than `prompts` in a round


@pytest.mark.parametrize("advantage, differ", [("grpo", "sum"), ("gdpo", "terms")])
def test_filtered_groups_differ_in_what_the_advantage_compares(world, advantage, differ):
    """Of two functions whose sum is the same for every sample, and a third that is so for every other prompt."""
    source = make_source(filter_groups=True, advantage=advantage)
    parts = {
        "even": lambda s: 0.0 if s.prompt.id % 2 else float(s.index % 2),
        "first": lambda s: float(s.index % 2),
        "other": lambda s: 1.0 - s.index % 2,
    }
    source.score.rewards = RewardPipeline([(Each(*piece), 1.0) for piece in parts.items()], RewardConfig())
    _, metrics, scores = source.next(1)
    odd = [not any(scores.components["even"][i : i + GROUP]) for i in range(0, PROMPTS * GROUP, GROUP)]
    assert any(odd) == (differ == "terms") and (metrics["filter/dropped_prompts"] > 0) == (differ == "sum")


def normalised(steps: int = 3, **algorithm):
    """The job of a rank: rollouts whose rewards are normalised. Returns (raw rewards, greedy ones, the normaliser)."""
    source = make_source(dist.get_world_size(), dist.get_rank(), **algorithm)
    config = RewardConfig(normalize=True)
    source.score.rewards = RewardPipeline([(Right(), 2.0)], config, reduce=summed)
    out = []
    for step in range(1, steps + 1):
        rollout, _, scores = source.next(step)
        out.append((scores.raw, scores.total, rollout.greedy_rewards, source.score.rewards.state_dict()))
    return out


def summed(values: list[float]) -> list[float]:
    return sum_over(torch.tensor(values, dtype=torch.float64), dist.group.WORLD).tolist()


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("advantage", ["grpo", "remax"])
def test_the_running_normaliser_sees_what_is_trained_on_and_nothing_else(world, advantage, filtering):
    """Neither groups that a round of filtering drops, nor greedy responses, nor anything twice."""
    seen = []
    for raw, total, _, state in normalised(advantage=advantage, filter_groups=filtering):
        seen += [value for value in raw if value == value]
        mean, std = fmean(seen), pstdev(seen)
        assert state["count"] == len(seen) and state["mean"] == pytest.approx(mean)
        assert state["m2"] == pytest.approx(std**2 * len(seen))
        assert [t for t in total if t == t] == pytest.approx([(v - mean) / std for v in raw if v == v])


@pytest.mark.multirank
@pytest.mark.parametrize("filtering", [False, True])
def test_two_ranks_normalise_as_one(ranks, world, filtering):
    algorithm = {"advantage": "remax", "filter_groups": filtering}
    alone = normalised(**algorithm)
    pair = ranks.run(normalised, world=2, **algorithm)
    for step, (raw, total, greedy, state) in enumerate(alone):
        parts = [rank[step] for rank in pair]
        for position, want in ((0, raw), (1, total)):
            assert [x for piece in parts for x in piece[position]] == pytest.approx(want, nan_ok=True)
        torch.testing.assert_close(torch.cat([piece[2] for piece in parts]), greedy, equal_nan=True)
        assert all(piece[3] == pytest.approx(state) for piece in parts)


def test_remax_generates_and_scores_one_greedy_response_for_each_prompt(world):
    overlong = OverlongConfig(penalty=0.25, soft_fraction=0.5)
    source = make_source(advantage="remax", overlong=overlong)
    rollout, _, _ = source.next(1)
    (_, _, sampled), (prompts, seeds, greedy) = source.generator.engine.calls
    assert sampled.temperature == 1 and greedy.temperature == 0 and greedy.max_response_tokens == LIMIT
    assert [tuple(p) for p in prompts] == [s.prompt.tokens for s in rollout.samples[::GROUP]]
    assert all(len(s) == 1 for s in seeds) and len(rollout.lengths) == PROMPTS * GROUP  # it does not train
    for i, sample in enumerate(rollout.samples):
        tokens = answer(sample.prompt.tokens, int(rollout.group[i]))  # a seed that no other request of it has
        want = 2.0 * (tokens[-1] == 2) - 0.25 * (len(tokens) == LIMIT) + min(0.0, (2 - len(tokens)) / 2)
        actual = float(rollout.greedy_rewards[i])
        assert actual != actual if len(sample.prompt.tokens) == 1 else actual == want
