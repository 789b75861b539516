"""A vLLM engine of several ranks over the real package on a CPU: a process of each rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import aligner.engines.child.engine as child
from aligner.engines.child import ranks
from aligner.engines.vllm import worker
from aligner.engines.vllm.engine import VllmEngine
from aligner.engines.vllm.in_place import InPlaceVllmEngine
from aligner.engines.vllm.worker import VllmWorker
from aligner.errors import ConfigError, EngineError
from aligner.models.shards import hf_tensors
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.ops.reduce import gathered
from aligner.types import SamplingParams
from tests.engines.contract import PROMPTS, check_greedy, check_logprobs, reference, responses, seeds_for
from tests.engines.vllm.lent import fork
from tests.engines.vllm.setup import LLAMA, MODELS, make_engine, needs_vllm, server
from tests.ranks import on_ranks
from tests.tiny import hf_weights

SAMPLING = SamplingParams(12, temperature=0.7, stop_token_ids=(3,))


def of_ranks(body):
    return needs_vllm(pytest.mark.slow(pytest.mark.multirank(on_ranks(2)(body))))


@pytest.fixture
def path():
    return server()


@contextmanager
def engine_of_all(path: str, cfg=LLAMA, node: str = "one", **options) -> Iterator[VllmEngine]:
    """One engine of all ranks. This rank seems to be on `node`."""
    with patch.object(child, "spawn", partial(fork, path)), patch.object(child, "node", lambda: node):
        width = dist.get_world_size()
        engine = make_engine(cfg, process=True, tensor_parallel=width, group=dist.group.WORLD, **options)
    yield engine
    engine.close()


def weights_of(model) -> dict[str, torch.Tensor]:
    """Of a model of all ranks, of which one alone writes files."""
    return gathered(hf_weights(model) if dist.get_rank() == 0 else None)[0]


def filled(engine, cfg, version: int):
    """Return the model whose weights an engine has got."""
    model = reference(cfg, version)
    engine.begin_update(version)
    engine.update_weights(weights_of(model).items())
    engine.finish_update()
    return model


@of_ranks
def test_ranks_on_two_nodes_generate_together_until_one_is_stopped(path):
    """Weights by the plan of a refit: all of them on each node. Then an interruption of the first rank alone."""
    with engine_of_all(path, node=f"node {dist.get_rank()}", kind=InPlaceVllmEngine, max_batch=2) as engine:
        assert not engine._on_one_node
        for version in (1, 2):
            model = reference(LLAMA, version)
            held = weights_of(model)
            engine.begin_update(version)
            for tensor in hf_tensors(LLAMA):
                engine.weight_view(tensor.name, 0, tensor.length).copy_(held[tensor.name])
            engine.finish_update()
            assert engine.checksums() == {name: tensor_checksum(tensor) for name, tensor in held.items()}
            out = engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING)
            check_logprobs(model, PROMPTS, 3, out, 0.7)
        wanted = responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(8, temperature=0)))
        check_greedy(model, PROMPTS, 8, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(8, temperature=0)))

        def stop(done, total):
            raise KeyboardInterrupt

        with pytest.raises(EngineError if dist.get_rank() else KeyboardInterrupt):
            engine._generated([[1 + i % 50] for i in range(100)], [[i] for i in range(100)], SamplingParams(30), stop)
        assert wanted == responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(8, temperature=0)))


@of_ranks
def test_experts_of_several_ranks_and_the_end_of_one(path):
    """Each rank has some experts whole, of a width that two ranks could not share."""
    cfg = replace(MODELS["qwen3_moe"], moe=replace(MODELS["qwen3_moe"].moe, ffn_hidden_size=25))
    with engine_of_all(path, cfg, args={"enable_expert_parallel": True}) as engine:
        for version in (1, 2):
            model = filled(engine, cfg, version)
            model.set_experts_implementation("eager")  # else torch multiplies groups, by rows of 16 bytes
            check_logprobs(model, PROMPTS, 3, engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING), 0.7)
        if dist.get_rank():
            os.kill(engine._channel.child.process.pid, 6)
        with pytest.raises(EngineError, match=r"(?s)ended by signal 6 in generate.*Its last output"):
            engine.generate(PROMPTS, seeds_for(PROMPTS), SAMPLING)
        how = "ended by signal 6" if dist.get_rank() else "ended with exit code 76"
        assert engine._channel.child.ended() == how


def test_shares_have_requests_of_their_own_and_get_all_results(monkeypatch):
    """Of four ranks two and two; vLLM's CPU build has no such shares."""
    workers = [VllmWorker.__new__(VllmWorker) for _ in range(4)]
    for rank, each in enumerate(workers):
        each._shares, each._width, each._unlike = 2, 2, None
        each.settings = SimpleNamespace(rank=rank)
    for requests in (list(range(5)), [0], []):
        own = [each._share(requests) for each in workers]
        assert own == [requests[::2]] * 2 + [requests[1::2]] * 2
        results = [[10 * one for one in each] for each in own]
        monkeypatch.setattr(worker, "gathered_messages", lambda _, group, results=results: results)
        for each in workers:
            assert each._joined(lambda one: 10 * one, each._share(requests)) == [10 * one for one in requests]
    with pytest.raises(ConfigError, match=r"data_parallel_size=2: expected 1 on a CPU"):
        make_engine(MODELS["qwen3_moe"], tensor_parallel=2, args={"data_parallel_size": 2})


def test_ranks_that_do_not_step_alike_are_an_error(monkeypatch):
    """Of four, the first two with the same requests, and the others."""
    actual = VllmWorker.__new__(VllmWorker)
    actual.line, actual._width, actual.settings = object(), 2, SimpleNamespace(tensor_parallel=4)
    states = []
    monkeypatch.setattr(worker, "of_each_rank", lambda own, group: [torch.tensor(state) for state in states])
    states[:] = [(0, 1), (0, 1), (0, 5), (0, 5)]
    assert not actual._stopped(False, 1)
    states[2] = (1, 5)
    assert actual._stopped(False, 1)
    states[3] = (0, 4)
    with pytest.raises(EngineError, match="the ranks 2 to 3 of the engine have finished 5, 4 of the same rows"):
        actual._stopped(False, 1)


def test_an_error_in_the_work_of_all_ends_the_process(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    with ranks.ending_all(object()):
        raise ValueError("of one rank")
    assert ended == [1] and "ValueError: of one rank" in capfd.readouterr().err
    with pytest.raises(ValueError, match="alone"), ranks.ending_all(None):
        raise ValueError("alone")
