"""The vLLM engine over the real package on a CPU: the contract of all engines, and what is its own."""

import pytest

from aligner.errors import ConfigError
from aligner.types import SamplingParams
from tests.engines.contract import EngineContract, fill, reference
from tests.engines.vllm.setup import LLAMA, MODELS, make_engine, needs_vllm

pytestmark = needs_vllm


class TestVllmEngine(EngineContract):
    table = MODELS
    make_engine = staticmethod(make_engine)

    def test_a_row_that_can_never_fit_is_refused(self):
        model, block = (
            reference(LLAMA),
            32 * 2 * 2 * 2 * 32 * 4,
        )  # positions, layers, k and v, kv heads, head_dim, float32
        engine = fill(make_engine(LLAMA, kv_cache_bytes=2 * block), model)
        assert engine.generate([[1, 2, 3]], [[0]], SamplingParams(29)).tokens.shape == (1, 29)
        with pytest.raises(ConfigError, match=f"engine.kv_cache_bytes.*{3 * block} bytes"):
            engine.generate([[1, 2, 3]], [[0]], SamplingParams(62))
