"""What the vLLM engine refuses, and what needs no vLLM to be shown."""

import ast
import sys
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

import aligner.engines.child.engine as child
from aligner.config.resolve import compose
from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.vllm import VllmConfig
from aligner.config.validate_model import check_node, validate_model
from aligner.engines.base import UpdateLedger
from aligner.engines.child.worker import KV_CACHE, WEIGHTS
from aligner.engines.native.fleet import Fleet
from aligner.engines.vllm.engine import VllmEngine
from aligner.engines.vllm.sampling import sampling_arguments
from aligner.engines.vllm.worker import Worker, import_vllm
from aligner.errors import ConfigError, LayoutError, RefitError
from aligner.types import SamplingParams
from tests.engines.vllm.setup import LLAMA, PYTHON, make_engine, needs_vllm


def test_without_an_environment_one_line_says_how_to_get_it():
    expected = r"engine.vllm.python='/nowhere/python': expected the path of a Python.*launchers/engine_env.sh vllm"
    with pytest.raises(ConfigError, match=expected):
        make_engine(LLAMA, python="/nowhere/python")


@pytest.mark.slow
def test_an_interpreter_without_vllm():
    with pytest.raises(ConfigError, match=r"engine.vllm.python=.*expected an interpreter with vLLM.*engine_env.sh"):
        make_engine(LLAMA, python="", process=True)


def test_another_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.2"))
    with pytest.raises(ConfigError, match=r"expected vLLM 0.32.0. Installed is 0.31.2; launchers/engine_env.sh"):
        import_vllm()


def test_sleep_on_a_cpu():
    with pytest.raises(ConfigError, match=r"engine.vllm.sleep=True: expected false on a CPU"):
        make_engine(LLAMA, sleep=True, python=sys.executable)


@pytest.mark.parametrize(
    ("width", "nodes", "own", "across"),
    [
        (2, (4, 4), 0, ""),
        (4, (8, 8), 0, ""),
        (2, (3, 3), 0, "2 to 3"),
        (8, (4, 4), 0, "0 to 7"),
        (2, (3, 3), 2, ""),
        (2, (4, 4), 5, "3 to 4"),
        (4, (2, 4), 4, ""),
        (4, (4, 2, 2), 4, "4 to 7"),
    ],
)
def test_a_replica_stays_within_a_node(width, nodes, own, across):
    cfg = compose(["stage=grpo", "engine=vllm", f"engine.tensor_parallel={width}", f"engine.ranks={own}"])
    ends = [*accumulate(nodes)]
    ranks = [range(end - size, end) for end, size in zip(ends, nodes, strict=True)]
    if not across:
        for node in ranks:
            check_node(cfg, node, ends[-1])
        return
    local = nodes[-1]
    text = rf"engine.tensor_parallel={width}: expected replicas within a node of {local} .*: ranks {across} are on two"
    with pytest.raises(LayoutError, match=text):
        check_node(cfg, ranks[-2], ends[-1])
        check_node(cfg, ranks[-1], ends[-1])


def test_ranks_that_cannot_share_its_heads():
    cfg = compose(["stage=grpo", "engine=vllm", "engine.tensor_parallel=4"])
    with pytest.raises(LayoutError, match=r"model.num_kv_heads=2: expected a multiple of engine.tensor_parallel=4"):
        validate_model(cfg, replace(LLAMA, max_position=4096))


def test_models_that_it_does_not_serve():
    cfg = compose(["stage=grpo", "engine=vllm"])
    model = replace(LLAMA, max_position=4096)
    validate_model(cfg, model)
    with pytest.raises(ConfigError, match=r"model.family='glm': expected one of llama.*engine=native serves it"):
        validate_model(cfg, replace(model, family="glm", qkv_bias=True))
    some = AttentionConfig(window=6, global_layers=[0])
    with pytest.raises(ConfigError, match=r"model.attention.window=6: expected 0, or all layers local.*qwen3"):
        validate_model(cfg, replace(model, family="qwen3", qk_norm=True, attention=some))
    with pytest.raises(ConfigError, match=r"model.head_dim=64: expected hidden_size / num_heads = 32"):
        validate_model(cfg, replace(model, family="qwen2", qkv_bias=True, head_dim=64))


@pytest.mark.parametrize(
    ("seen", "rank", "width", "given"),
    [("", 1, 1, "1"), ("", 2, 2, "2,3"), ("4,5,6", 1, 2, "5,6"), ("4,5,6", 2, 2, None), ("", 3, 2, None)],
)
def test_the_child_sees_the_devices_of_its_ranks(monkeypatch, seen, rank, width, given):
    """Of a machine with four. The buffer of its weights is on the first of them."""
    found = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(child, "spawn", lambda worker, environ, *more: found.update(environ))
    engine = VllmEngine.__new__(VllmEngine)
    engine.options, engine._group = VllmConfig(), SimpleNamespace(size=lambda: width)
    if given is None:
        with pytest.raises(ConfigError, match=rf"engine.tensor_parallel={width}: expected at most 1"):
            engine._process(torch.device("cuda", rank), "")
    else:
        engine._process(torch.device("cuda", rank), "")
        assert found["CUDA_VISIBLE_DEVICES"] == given and found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_one_of_several_replicas_is_asked_as_a_native_one_is(monkeypatch):
    """It has no weights yet, and says so."""
    engine = VllmEngine.__new__(VllmEngine)
    engine.tensor_parallel, engine._ledger = 1, UpdateLedger({})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RefitError, match="no complete weights"):
        engine._part(Fleet(1, parts=1), [], [], [[]], SamplingParams(1), None)


class Recorder:
    """Notes what is called of vLLM's engine."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *a, **k: self.calls.append((name, *a, *k.values()))


def test_what_sleep_would_call_on_a_gpu():
    """Order and arguments; that vLLM has them is below, that they give memory back was not seen."""
    worker = Worker.__new__(Worker)
    worker.engine, worker.whole = Recorder(), True
    worker.sleep([KV_CACHE])
    worker.wake([KV_CACHE])
    assert worker.whole
    worker.sleep([KV_CACHE, WEIGHTS])
    worker.wake([WEIGHTS])
    assert not worker.whole
    kept = [("sleep", 0), ("release_kv_cache_memory",), ("wake_up", ["kv_cache"])]
    assert worker.engine.calls == [*kept, ("sleep", 2), ("wake_up", ["weights"])]


@needs_vllm
def test_the_package_has_what_a_gpu_would_need():
    (source,) = PYTHON.parents[1].glob("lib/python*/site-packages/vllm/v1/engine/llm_engine.py")
    (engine,) = (n for n in ast.parse(source.read_text()).body if getattr(n, "name", "") == "LLMEngine")
    found = {n.name: [a.arg for a in n.args.args] for n in engine.body if isinstance(n, ast.FunctionDef)}
    assert "level" in found["sleep"] and "tags" in found["wake_up"] and "release_kv_cache_memory" in found


def test_greedy_sampling_is_not_cut_and_ends_at_stop_tokens_alone():
    found = sampling_arguments(SamplingParams(7, temperature=0, top_p=0.5, top_k=3, stop_token_ids=(4,)))
    assert (found["temperature"], found["top_p"], found["top_k"], found["min_p"]) == (0, 1.0, 0, 0.0)
    assert found["max_tokens"] == 7 and found["stop_token_ids"] == [4] and found["ignore_eos"]
    cut = sampling_arguments(SamplingParams(7, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1))
    assert (cut["temperature"], cut["top_p"], cut["top_k"], cut["min_p"]) == (0.5, 0.5, 3, 0.1)
