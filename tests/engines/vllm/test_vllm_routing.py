"""vLLM's report of the experts of each token. Its CPU build does not give one, so the adapter runs over outputs as the
installed sources make them, and those are read."""

import ast
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.child.worker import Settings
from aligner.engines.vllm.engine import VllmEngine
from aligner.engines.vllm.extension import Extension
from aligner.engines.vllm.worker import VllmWorker
from aligner.errors import ConfigError, EngineError
from aligner.ops.packing.routing import no_routing
from tests.engines.test_routing import MIXED
from tests.engines.vllm.setup import PYTHON, needs_vllm

PROMPTS, ANSWERS = [[5, 6, 7], [8, 9]], [[1, 2], [3, 4, 5, 6]]


def source(file: str) -> str:
    (path,) = PYTHON.parents[1].glob(f"lib/python*/site-packages/vllm/{file}")
    return path.read_text()


def function(file: str, name: str) -> str:
    (found,) = (n for n in ast.walk(ast.parse(source(file))) if getattr(n, "name", "") == name)
    return ast.unparse(found)


def worker_of(experts: list[np.ndarray]) -> VllmWorker:
    worker = VllmWorker.__new__(VllmWorker)
    worker.settings = Settings("", None, 53, "float32", 64, 4, 1 << 24, *[False] * 4, 0, False, routed_layers=(0, 2))
    worker._shares, worker._width, worker._unlike, worker.whole = 1, 1, None, True
    worker._requests, worker._routed = 0, None
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=one)]) for one in experts]
    worker._routed = worker._experts(outputs)
    return worker


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_experts_of_dense_layers_are_left_out_and_rows_are_padded(kind):
    """VLLM has a row for each token that was fed, and a column for each layer."""
    fed = [len(p) + len(a) - 1 for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    experts = [np.random.default_rng(i).integers(1, 5, (n, 3, 2)).astype(kind) for i, n in enumerate(fed)]
    worker = worker_of(experts)
    engine = VllmEngine.__new__(VllmEngine)
    engine.no_routing, engine._group = no_routing(MIXED), None  # its second layer of three is dense
    engine._call = lambda name: getattr(worker, name)()
    rows = [(answer, None, 0, None) for answer in ANSWERS]
    routing = engine._routing(PROMPTS, rows)
    assert routing.dtype == torch.uint8 and routing.shape == (2, 6, 2, 2)
    for row, one in zip(routing, experts, strict=True):
        assert row[: len(one)].tolist() == one[:, [0, 2]].tolist() and not row[len(one) :].any()
    engine._call = lambda name: torch.zeros(3, 2, 2)
    with pytest.raises(EngineError, match=r"vLLM named experts \[3, 2, 2\]: expected \[9, 2, 2\]"):
        engine._routing(PROMPTS, rows)


def test_it_is_refused_on_a_cpu_and_asks_for_the_other_model_runner():
    engine = VllmEngine.__new__(VllmEngine)
    engine.device, engine.no_routing = torch.device("cuda", 0), None
    assert engine._variables()["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    engine.no_routing = no_routing(MIXED)
    assert engine._variables()["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    with pytest.raises(ConfigError, match=r"replay_routing=True: expected false with engine.name=vllm on a CPU"):
        on_cpu = {"device": "cpu", "dtype": torch.float32, "pad_id": 0}
        VllmEngine(MIXED, EngineConfig(name="vllm"), **on_cpu, reports_routing=True)


def test_its_logprobs_of_prompts_are_tempered():
    class Prompts:
        def compute_prompt_logprobs(self, logits_of, hidden, *rest):
            return logits_of(hidden), rest

    runner = SimpleNamespace(prompt_logprobs_worker=Prompts())
    extension = Extension()
    extension.model_runner = runner
    for temperature in (4.0, 2.0):  # not one after the other
        extension.aligner_temper(temperature)
        assert runner.prompt_logprobs_worker.compute_prompt_logprobs(lambda h: h, 8.0, 1) == (8 / temperature, (1,))


@needs_vllm
def test_the_package_does_what_the_adapter_expects():
    """Where a name here is missing, read the sources again. Not run on a GPU."""
    assert "enable_return_routed_experts: bool = False" in source("engine/arg_utils.py")
    checks = function("config/vllm.py", "_verify_aux_output_compatibility")
    assert "not self.use_v2_model_runner" in checks and "not self.cache_config.enable_prefix_caching" in checks
    # rows of all tokens but the last one, from the first of the prompt on
    ends = function("distributed/aux_output_connector/connector.py", "take_output")
    assert "token_end = request.num_tokens - 1" in ends and "request_output.rows[:local_end]" in ends
    assert "np.concatenate(self.routed_experts_chunks, axis=0)" in source("v1/engine/output_processor.py")
    capturer = "model_executor/layers/fused_moe/routed_experts_capturer.py"
    assert "model_config.get_total_num_hidden_layers()" in function(capturer, "_get_routed_experts_shape")
    assert "'uint8' if num_experts <= 256 else 'uint16'" in ast.unparse(ast.parse(source(capturer)))
    # of several tensor ranks the first alone has them; the schedulers of the others would miss them
    assert "if not get_tp_group().is_first_rank:\n            return" in source(
        "distributed/aux_output_connector/worker.py"
    )
    scheduler = source("v1/core/sched/scheduler.py")
    uses = scheduler.count("self.aux_output_connector.") - scheduler.count("self.aux_output_connector.reset()")
    assert uses == 4 and scheduler.count("self.aux_output_connector is not None") >= 5
    # a reset of the prefix cache, after each update, forgets them too
    assert "self.aux_output_connector.reset()" in function("v1/core/sched/scheduler.py", "reset_prefix_cache")
    runner = source("v1/worker/gpu/model_runner.py")
    assert "self.prompt_logprobs_worker.compute_prompt_logprobs(\n            self.model.compute_logits," in runner
    assert "def get_model(self)" in runner and "self.device = device" in runner
