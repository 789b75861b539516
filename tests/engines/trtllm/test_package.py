"""What a package's sources tell, without importing it: as the imported package itself would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from aligner.engines.trtllm import torch_api
from aligner.engines.trtllm.features import FEATURES
from aligner.engines.trtllm.package import Installed, Sources
from tests.engines.trtllm.setup import FAKE

# real packages, as they are installed: moved and inherited names, generated ones, dataclasses, functions
SYMBOLS = {
    "transformers": (
        "transformers.generation.configuration_utils:GenerationConfig.from_pretrained",
        "transformers.generation.utils:GenerationMixin.generate",
        "transformers.models.llama.modeling_llama:LlamaForCausalLM.forward",
        "transformers.models.llama.modeling_llama:LlamaForCausalLM.generate",  # inherited
        "transformers.models.llama.modeling_llama:LlamaForCausalLM.nothing",
        "transformers.models.llama.modeling_llama:LlamaRMSNorm",
        "transformers.models.llama.modeling_llama:ACT2FN",  # imported there
        "transformers.nowhere:Thing",
        "transformers.trainer_utils:EvalPrediction|transformers.nowhere:Thing",
    ),
    "omegaconf": ("omegaconf:OmegaConf.merge", "omegaconf:DictConfig.pop", "omegaconf:Nothing", "omegaconf:MISSING"),
}
CALLS = (
    "omegaconf:OmegaConf.to_container",
    "transformers.models.llama.modeling_llama:LlamaRMSNorm",
    "transformers.models.llama.modeling_llama:rotate_half",
    "transformers.models.llama.modeling_llama:repeat_kv",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMBOLS)
def test_sources_tell_what_the_imported_package_has(name):
    folder = Path(importlib.util.find_spec(name).origin).parents[1]
    sources, wanted = Sources(folder, name), Installed(name)
    for symbol in SYMBOLS[name]:
        assert sources.has(symbol) == wanted.has(symbol), symbol
    for symbol in CALLS:
        if symbol.startswith(name):
            assert sources.accepts(symbol) - {"self"} == wanted.accepts(symbol) and wanted.accepts(symbol), symbol


WHEEL = {
    "tensorrt_llm/__init__.py": """
raise OSError('libcuda')
from .llmapi import *
from .sampling import SamplingParams as SamplingParams
""",
    "tensorrt_llm/version.py": "__version__: str = '1.3.0rc7'",
    "tensorrt_llm/sampling.py": """
@dataclass
class SamplingParams:
    end_id: int = 0
    logprobs_simple_format: bool = False
""",
    "tensorrt_llm/llmapi/__init__.py": """
from .args import TorchLlmArgs
LlmArgs = TorchLlmArgs
try:
    from .gone import LLM
except ImportError:
    class LLM:
        def shutdown(self): ...
""",
    "tensorrt_llm/llmapi/args.py": """
class Base:
    model: str
class TorchLlmArgs(Base):
    sleep_config: int = 0
    @property
    def old(self): ...
""",
}


@pytest.fixture
def wheel(tmp_path):
    """Of a package that cannot be imported, with what the newest sources do with names."""
    for name, text in WHEEL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_names_are_followed_to_where_they_are_defined(wheel):
    sources = Sources(wheel, "tensorrt_llm")
    assert sources.version == "1.3.0rc7"
    assert sources.accepts("tensorrt_llm:LlmArgs") == {"model", "sleep_config", "old"}
    assert sources.accepts("tensorrt_llm:SamplingParams") == {"end_id", "logprobs_simple_format"}
    assert sources.has("tensorrt_llm:LLM.shutdown") and not sources.has("tensorrt_llm:LLM.start")
    assert not sources.has("tensorrt_llm.llmapi.gone:LLM") and sources.accepts("tensorrt_llm:Nothing") == set()
    assert "tensorrt_llm" not in sys.modules


def test_an_unpacked_wheel_is_compared_feature_by_feature(wheel, capsys):
    assert torch_api.main(["--source", str(wheel)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "TensorRT-LLM 1.3.0rc7, compared with the table's 1.3"
    reports = {line.split()[0]: line.split()[1] for line in lines[1 : len(FEATURES) + 1]}
    assert reports == {name: "yes" if name == "plain_logprobs" else "no" for name in FEATURES}
    assert "  missing: tensorrt_llm:LLM.generate_async" in lines
    assert "  missing: tensorrt_llm:LLM.shutdown" not in lines


def test_a_folder_without_the_package(tmp_path, capsys):
    with pytest.raises(SystemExit):
        torch_api.main(["--source", str(tmp_path)])
    assert "expected a folder that holds tensorrt_llm/__init__.py" in capsys.readouterr().err


def test_the_stand_ins_sources_tell_what_it_has(monkeypatch):
    """But for what it makes while it runs: SamplingParams, and the fields of its arguments."""
    comparison = torch_api.compare(package=Sources(FAKE, "tensorrt_llm"))
    made = ("tensorrt_llm:SamplingParams",)
    assert not [symbol for symbol in comparison.missing if not symbol.startswith(made)]
    assert all(comparison.features[name] for name in ("update_hooks", "balancer", "finalize", "ranks"))
