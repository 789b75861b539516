"""The proof after every refit: what it lets pass and what it catches, with the native engine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.base import RolloutEngine
from aligner.engines.native.engine import NativeEngine
from aligner.errors import RefitError
from aligner.megatron.train import ShardedModel
from aligner.refit.transfer import Refit
from aligner.refit.verify import Verifier, staleness
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from aligner.types import TrainBatch
from tests.megatron.models import build, nll_loss, shares
from tests.ranks import on_ranks
from tests.tiny import LLAMA, MODELS, MOE, batch

pytestmark = pytest.mark.multirank

ONE, TP, PP = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2)
SMALL = OptimConfig(lr=5e-4)  # about one unit in the last place of a bfloat16 weight


def native(cfg: ModelConfig, dtype: torch.dtype) -> NativeEngine:
    return NativeEngine(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0)


def sentinel(model: ShardedModel, refit: Refit, rows: TrainBatch) -> Verifier:
    def logprobs(tokens, lengths):
        return Policy(model, BatchConfig()).logprobs(TrainBatch(tokens, lengths, torch.zeros(len(tokens), 0)))

    return Verifier(refit, rows.tokens, rows.lengths, logprobs)


def one_step(model: ShardedModel, rows: TrainBatch) -> None:
    model.step(micro_batches(shares(model, rows), BatchConfig(micro_batch_samples=8)), nll_loss(model, rows))


def follow(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    optim: OptimConfig,
    steps: int,
    engine_dtype: torch.dtype | None = None,
) -> list[dict]:
    """Refit, check, step, again and again; the last round without a step before it."""
    model, engine = build(cfg, parallel, optim, dtype=dtype), native(cfg, engine_dtype or dtype)
    refit = Refit(model, engine, RefitConfig(bucket_bytes=5000, verify="checksum"))
    rows = batch(cfg)
    verifier, messages = sentinel(model, refit, rows), []
    for round_ in range(steps + 2):
        metrics = refit() | verifier.check()
        real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
        gap = engine.logprobs(rows.tokens, rows.lengths) - Policy(model, BatchConfig()).logprobs(rows)
        messages.append(metrics | {"gap": float((gap * real).abs().max()), "engine": engine.weight_version})
        if round_ < steps:
            one_step(model, rows)
    return messages


@pytest.fixture
def logprobs():
    g = torch.Generator().manual_seed(3)
    current = -torch.rand(400, generator=g) * 5
    return current, current + 0.02 * torch.randn(400, generator=g), 0.005 * torch.randn(400, generator=g)


def test_progress_is_a_projection(logprobs):
    current, previous, _ = logprobs
    for piece in (0.0, 0.3, 0.7, 1.0):
        stale, progress = staleness(previous + piece * (current - previous), current, previous)
        assert progress == pytest.approx(piece, abs=1e-5)
        assert stale == (piece < 0.5)


def test_noise_changes_no_verdict(logprobs):
    current, previous, noise = logprobs
    assert staleness(current + noise, current, previous)[0] is False
    assert staleness(previous + noise, current, previous)[0] is True
    # what no step gains: an engine that is off elsewhere is the tolerance's business
    far = current + 100 * noise
    assert staleness(far, current, previous)[0] is False


def test_the_verdict_is_withheld_without_power(logprobs):
    current, previous, noise = logprobs
    near = current + (previous - current) * 1e-3  # a step far below the noise
    assert staleness(near + noise, current, near)[0] is False
    assert staleness(current + noise, current, current) == (False, 1.0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "world, parallel, dtype, name",
    [
        (1, ONE, torch.float32, "qwen3"),
        (1, ONE, torch.bfloat16, "llama"),
        (2, TP, torch.float32, "qwen2"),
        (2, ParallelConfig(pipeline=2, virtual_stages=2), torch.bfloat16, "qwen3"),
        (2, ONE, torch.bfloat16, "llama"),
        (4, ParallelConfig(tensor=2, pipeline=2), torch.float32, "llama"),
        (2, ParallelConfig(expert=2), torch.float32, "qwen3_moe"),
        (4, ParallelConfig(expert=2, pipeline=2), torch.bfloat16, "qwen3_moe"),
    ],
)
@on_ranks()
def test_a_refitted_engine_passes(world, parallel, dtype, name):
    cfg = MOE if name == "qwen3_moe" else replace(MODELS[name], num_layers=5)
    reported = follow(cfg, parallel, dtype, SMALL, steps=3)
    assert [t["engine"] for t in reported] == [t["refit/version"] for t in reported] == [0, 1, 2, 3, 3]
    assert reported[-1]["refit/sentinel_progress"] == 1.0  # no step: nothing to compare
    assert reported[-1]["refit/bytes"] == 0, "no step: the engine holds these very weights"
    assert all(t["refit/bytes"] > 0 and t["refit/gb_per_s"] > 0 for t in reported[:-1])
    for t in reported:
        assert t["refit/seconds"] > 0
        if dtype == torch.float32:
            assert t["gap"] <= 1e-4 and abs(t["refit/sentinel_progress"] - 1) < 0.05
        else:
            assert t["refit/sentinel_error"] < 0.05 and t["refit/sentinel_progress"] > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world, parallel", [(1, ONE), (2, PP)])
@pytest.mark.parametrize("verify", ["sentinel", "checksum"])
@on_ranks()
def test_one_missed_step_is_caught(world, parallel, dtype, verify):
    """The engine keeps its weights through one optimizer step."""
    model, engine, rows = build(LLAMA, parallel, SMALL, dtype=dtype), native(LLAMA, dtype), batch(LLAMA)
    refit = Refit(model, engine, RefitConfig(bucket_bytes=5000, verify=verify), skip=True)
    verifier = sentinel(model, refit, rows)
    refit()
    verifier.check()
    one_step(model, rows)
    refit()
    with pytest.raises(RefitError) as caught:
        verifier.check()
    message = str(caught.value)
    assert message.startswith("refit failed on rank 0: weight version: engine 0, trainer 1")
    assert ("checksum of" in message) == (verify == "checksum")
    assert "nearer to the previous weights" in message


@on_ranks(1)
def test_an_engine_in_another_dtype_passes():
    """Its hashes are of the weights as it holds them, its tolerance is that of its own dtype."""
    reported = follow(LLAMA, ONE, torch.float32, OptimConfig(lr=1e-2), steps=2, engine_dtype=torch.bfloat16)
    assert [t["engine"] for t in reported] == [0, 1, 2, 2]
    assert all(1e-4 < t["refit/sentinel_error"] < 0.05 for t in reported)


@on_ranks(1)
def test_a_resumed_run_keeps_its_sentinel():
    """The first refit after a resume gets its verdict, of an engine that missed a step; rows of another training set
    give none."""
    model, engine, rows = build(LLAMA, ONE, SMALL), native(LLAMA, torch.float32), batch(LLAMA)
    refit = Refit(model, engine, RefitConfig(tolerance=9.0), skip=True)  # the verdict alone
    before = sentinel(model, refit, rows)
    refit()
    before.check()
    kept = json.loads(json.dumps(before.state_dict()))
    one_step(model, rows)
    refit()
    engine._ledger.version = model.step_count  # an engine that lies about its version
    assert sentinel(model, refit, rows).check()["refit/sentinel_progress"] == 1.0
    after, other = sentinel(model, refit, rows), sentinel(model, refit, batch(LLAMA, seed=2))
    after.load_state_dict(kept)
    with pytest.raises(RefitError, match=r"^refit failed on rank 0: sentinel: nearer to the previous weights"):
        after.check()
    other.load_state_dict(kept)
    fresh = sentinel(model, refit, rows)
    fresh.load_state_dict(fresh.state_dict())
    assert other.previous is None and fresh.previous is None


def noisy(n, step, seed, stale):
    """Logprobs of an engine and of the trainer now and before, each with rounding of its own of width 1."""
    gen = torch.Generator().manual_seed(seed)
    before, moved, *rounding = torch.randn(5, n, generator=gen)
    now = before + step * moved
    return (before if stale else now) + rounding[0], now + rounding[1], before + rounding[2]


@pytest.mark.parametrize("step", [0.0, 0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("n", [16, 200])
def test_rounding_is_not_taken_for_stale_weights(n, step):
    """A learning rate so small that bfloat16 weights hardly move must not stop a run."""
    assert not any(staleness(*noisy(n, step, seed, stale=False))[0] for seed in range(2000))


@pytest.mark.parametrize(("n", "step"), [(16, 6.0), (200, 3.0)])
def test_a_step_beyond_the_rounding_gives_a_stale_engine_away(n, step):
    assert sum(staleness(*noisy(n, step, seed, stale=True))[0] for seed in range(500)) > 450


class Bigram(RolloutEngine):
    """A trainer, or an engine, whose logits are a matrix's row of the last token: `weights` score, `steps` decode."""

    dtype = torch.float32

    def __init__(self, weights, noise=0.0):
        self.weights = self.steps = weights
        self.weight_version, self.noise, self.rounding = 0, noise, torch.Generator().manual_seed(1)

    def rounded(self, values):
        return values + self.noise * torch.randn(values.shape, generator=self.rounding)

    def logprobs(self, tokens, lengths, temperature=1.0):
        actual = torch.zeros(tokens.shape)
        actual[:, 1:] = self.weights.log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]]
        return self.rounded(actual)

    def decoded(self, tokens, lengths, count):
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        out, results = [], []
        for _ in range(count):
            best = self.rounded(self.steps.log_softmax(-1)[last]).max(-1)
            last = best.indices
            out.append(last)
            results.append(best.values)
        return torch.stack(out, 1), torch.stack(results, 1)


def bigrams(step=0.02, noise=0.0, seed=0, **settings):
    """A verifier of such a pair, the pair, and what makes a step of the trainer."""
    generator = torch.Generator().manual_seed(seed)
    weights = 2 * torch.randn(40, 40, generator=generator)
    trainer, engine = Bigram(weights, noise), Bigram(weights, noise)
    model = SimpleNamespace(step_count=0, dtype=torch.float32)
    refit = SimpleNamespace(engine=engine, config=RefitConfig(tolerance=9.0), model=model, checksums={})
    tokens = torch.randint(0, 40, (6, 9), generator=generator)
    verifier = Verifier(refit, tokens, torch.tensor([9, 4, 2, 9, 7, 5]), trainer.logprobs, decoded=8, **settings)

    def advance(stale=False):
        trainer.weights = trainer.weights + step * torch.randn(40, 40, generator=generator)
        model.step_count = engine.weight_version = engine.weight_version + 1
        engine.weights = trainer.weights
        if not stale:
            engine.steps = trainer.weights

    return verifier, engine, advance


@pytest.mark.parametrize(("step", "noise"), [(0.02, 0.0), (0.02, 1e-4), (0.3, 0.01), (1.0, 0.05)])
@pytest.mark.parametrize("seed", range(3))
def test_decode_steps_with_old_weights_are_caught_while_scores_are_right(step, noise, seed):
    verifier, _, advance = bigrams(step, noise, seed)
    verifier.check()
    for _ in range(2):
        advance()
        reported = verifier.check()
        assert reported["refit/sentinel_progress"] > 0.5 and reported["refit/sentinel_error"] < 9
    advance(stale=True)
    with pytest.raises(RefitError, match="sentinel, generated tokens: nearer to the previous weights") as caught:
        verifier.check()
    assert "sentinel: " not in str(caught.value).split("on rank 0: ")[1]


@pytest.mark.parametrize("seed", range(20))
def test_right_decode_steps_pass(seed):
    """Whatever the step: also where it is far below the rounding, or changes every token."""
    for step in (0.0, 1e-4, 0.05, 3.0):
        verifier, _, advance = bigrams(step, 0.02, seed)
        for _ in range(4):
            verifier.check()
            advance()


def test_other_logprobs_of_generated_tokens_are_beyond_the_tolerance():
    """Of a sampler that tells those of another distribution, from the first refit on."""
    verifier, engine, _ = bigrams()
    verifier.refit.config.tolerance = 1e-3
    verifier.check()
    engine.steps = engine.weights / 0.5
    with pytest.raises(
        RefitError, match=r"sentinel, generated tokens: mean \|logprob difference\| .* > refit.tolerance"
    ):
        verifier.check()


def test_a_resumed_run_knows_what_was_generated():
    verifier, _, advance = bigrams()
    verifier.check()
    kept = json.loads(json.dumps(verifier.state_dict()))
    advance(stale=True)
    verifier.generated, verifier.previous = {}, None
    assert verifier.check()["refit/sentinel_progress"] == 1.0  # nothing to compare with
    verifier.load_state_dict(kept)
    with pytest.raises(RefitError, match="generated tokens: nearer"):
        verifier.check()
    verifier.load_state_dict({name: kept[name] for name in ("rows", "previous")})  # of an earlier version
    verifier.check()


def test_of_several_replicas_the_worst_counts(monkeypatch):
    verifier, engine, advance = bigrams()
    others = [Bigram(engine.weights), Bigram(engine.weights)]
    monkeypatch.setattr(
        verifier,
        "_decoded",
        lambda engine: [e.decoded(verifier.tokens, verifier.lengths, 8) for e in (engine, *others)],
    )
    verifier.check()
    advance()
    others[0].steps = engine.weights
    with pytest.raises(RefitError, match="generated tokens: nearer"):
        verifier.check()
    others[1].steps = engine.weights
    advance()
    for other in others:
        other.steps = engine.weights
    verifier.check()
