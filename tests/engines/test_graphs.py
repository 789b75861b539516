"""Decode steps as graphs: the engine's contract through a strict stand-in for CUDA graphs, and what the graphs may not
depend on."""

from dataclasses import replace

import pytest
import torch

from aligner.config.resolve import compose
from aligner.config.sections.engine import EngineConfig
from aligner.config.validate_model import validate_model
from aligner.engines.native import NativeEngine
from aligner.engines.native.graphs import REACH, DecodeGraphs, rounded_reach, rounded_rows
from aligner.errors import ConfigError
from aligner.types import SamplingParams
from tests.engines.contract import LLAMA, PROMPTS, EngineContract, fill, reference, responses, seeds_for
from tests.engines.graph_recorder import CaptureError, CpuRecorder
from tests.tiny import MOE


def make_engine(cfg, decode=None, dtype=torch.float32, device="cpu", **engine_config):
    engine = NativeEngine(cfg, EngineConfig(**engine_config), device=device, dtype=dtype, pad_id=0, decode=decode)
    if not cfg.moe.num_experts:  # the config refuses those
        engine.graphs = DecodeGraphs(engine.model, CpuRecorder())
    return engine


class TestEngineWithGraphs(EngineContract):
    make_engine = staticmethod(make_engine)


def plain(cfg, **engine_config):
    return NativeEngine(cfg, EngineConfig(**engine_config), device="cpu", dtype=torch.float32, pad_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [5, 512])
def test_graphs_serve_later_rollouts_and_other_weights(max_batch):
    """Rows leave, others are admitted to the slots that graphs write to, weights change in place."""
    engine, other = make_engine(LLAMA, max_batch=max_batch), plain(LLAMA, max_batch=max_batch)
    sampling = SamplingParams(40, stop_token_ids=(3, 11))
    for seed in range(3):
        for e in (engine, other):
            fill(e, reference(LLAMA, seed=seed))
        prompts = [[*p, *([5] * seed)] for p in PROMPTS]  # the longest row is another each time
        seeds = [[s + seed for s in row] for row in seeds_for(prompts, 4)]
        got, wanted = (e.generate(prompts, seeds, sampling) for e in (engine, other))
        assert responses(got) == responses(wanted)
        assert (got.logprobs - wanted.logprobs).abs().max() <= 1e-5
        steps = engine.stats.steps
    recorder = engine.graphs._record
    assert 1 <= recorder.recorded <= len(engine.graphs._graphs)  # none twice
    assert recorder.replayed > 2 * steps


def test_sleep_forgets_graphs_and_another_cache_makes_others():
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    wanted = responses(engine.generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(12)))
    recorder, before = engine.graphs._record, engine.graphs._record.recorded
    engine.generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(200))  # slots of another length
    assert recorder.recorded > before
    engine.sleep()
    assert not engine.graphs._graphs and not engine.graphs.held_bytes and recorder.forgotten
    engine.wake()
    assert responses(engine.generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(12))) == wanted


@pytest.mark.parametrize("slots", [1, 7, 100, 512])
def test_rows_are_rounded_up_a_little_and_to_few_numbers(slots):
    rows = [rounded_rows(n, slots) for n in range(1, slots + 1)]
    assert all(n <= r <= slots for n, r in enumerate(rows, 1))
    assert all(r <= max(n + 7, 9 / 8 * n + 1) for n, r in enumerate(rows, 1))
    assert rows == sorted(rows) and len(set(rows)) <= 40


def test_a_step_that_asks_the_device_cannot_be_recorded():
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        CpuRecorder()(lambda: torch.ones(2).mul_(float(torch.ones(1) + 1)))


def test_reaches_are_few_and_little_more_than_is_needed():
    reaches = [rounded_reach(n, 40_000) for n in range(1, 40_001)]
    assert all(n <= reach <= max(n + REACH, 1.5 * n) for n, reach in enumerate(reaches, 1))
    assert len(set(reaches)) < 32


def test_auto_captures_where_it_can():
    assert EngineConfig().captures and not EngineConfig(tensor_parallel=2).captures
    assert not EngineConfig(cuda_graphs=False).captures and EngineConfig(name="vllm", tensor_parallel=2).captures
    assert plain(LLAMA).graphs is None  # on a CPU


def test_what_graphs_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs"):
        plain(LLAMA, cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs.*tensor_parallel=1"):
        EngineConfig(cuda_graphs=True, tensor_parallel=2)
    cfg = compose(["stage=grpo", "engine.cuda_graphs=true"])
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs.*experts"):
        validate_model(replace(cfg, model=MOE), MOE)


def test_longer_rows_elsewhere_do_not_move_what_graphs_read():
    """Scoring long rows replaces the table of rotations."""
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    wanted = responses(engine.generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(12)))
    forgotten = engine.graphs._record.forgotten
    engine.logprobs(torch.ones(1, 250, dtype=torch.int64), torch.tensor([250]))
    assert responses(engine.generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(12))) == wanted
    assert engine.graphs._record.forgotten == forgotten + 1
