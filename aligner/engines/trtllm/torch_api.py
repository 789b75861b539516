"""What this project needs of TensorRT-LLM, per version: symbols, arguments, and what they mean. Data.

Read from its sources; nothing here has been run against a real package. `aligner doctor engine=trtllm` compares the
table with what is installed: `python -m aligner.engines.trtllm.torch_api` prints that comparison as JSON, on its last
line.

How the meaning of some parameters came and went:
  logprobs_mode   RAW (default: of the untempered distribution) or PROCESSED (of the sampled one): pull request 9675
  logprobs        1: of the likeliest token, later of that and the sampled one (pull request 9374 asked for it)
  seed            honoured per request by the default sampler (TorchSampler) since pull request 17172, ignored before
  min_p           honoured by that sampler since pull request 16590, ignored before
  sleep           `enable_sleep`, later `sleep_config`, which also says what becomes of released memory. The type of the
                  tags has moved between modules; their names, which are what both functions take, have not
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import isclass
from typing import Any

from aligner.errors import ConfigError

_SYMBOLS = (
    "tensorrt_llm:LLM",
    "tensorrt_llm:SamplingParams",
    "tensorrt_llm:LLM.generate_async",
    "tensorrt_llm:LLM.shutdown",
    "tensorrt_llm.llmapi:KvCacheConfig",
    "tensorrt_llm.llmapi:CudaGraphConfig",
    "tensorrt_llm.llmapi:RequestOutput.result",
    "tensorrt_llm.llmapi:RequestOutput.abort",
)
_RELOAD_SYMBOLS = (
    "tensorrt_llm._torch.pyexecutor.model_loader:ModelLoader.reload",
    "tensorrt_llm._torch.pyexecutor.py_executor:PyExecutor.control_action",
    "tensorrt_llm._torch.pyexecutor.py_executor:PyExecutor.reset_prefix_cache",
)
_SLEEP_SYMBOLS = (
    "tensorrt_llm._torch.virtual_memory:release_with_tag",
    "tensorrt_llm._torch.virtual_memory:materialize_with_tag",
)
_LOGPROB_MODE = "tensorrt_llm.sampling_params:LogprobMode"
_SLEEP_CONFIG = (
    "tensorrt_llm.llmapi.llm_args:SleepConfig",
    "tensorrt_llm.llmapi.llm_args:ExecutorMemoryType.KV_CACHE",
    "tensorrt_llm.llmapi.llm_args:ExecutorMemoryType.MODEL_WEIGHTS_MAIN",
)
_LLM = (
    "model load_format skip_tokenizer_init tensor_parallel_size dtype max_input_len max_seq_len max_batch_size "
    "max_num_tokens kv_cache_config cuda_graph_config allreduce_strategy"
)
_SAMPLING = (
    "end_id pad_id max_tokens stop_token_ids include_stop_str_in_output temperature top_k top_p min_p seed logprobs "
    "return_context_logits detokenize"
)
_ARGS = "tensorrt_llm.llmapi.llm_args:TorchLlmArgs"
_PARAMS = "tensorrt_llm:SamplingParams"
_KV = "tensorrt_llm.llmapi:KvCacheConfig"
_RELOAD = "tensorrt_llm._torch.pyexecutor.model_loader:ModelLoader.reload"


def _arguments(sleep: str, *sampling: str) -> dict[str, tuple[str, ...]]:
    config = {_SLEEP_CONFIG[0]: ("restore_modes",)} if sleep == "sleep_config" else {}
    return config | {
        _ARGS: (*_LLM.split(), sleep),
        _PARAMS: (*_SAMPLING.split(), *sampling),
        _KV: ("enable_block_reuse", "max_gpu_total_bytes"),
        "tensorrt_llm.llmapi:CudaGraphConfig": ("max_batch_size", "enable_padding"),
        "tensorrt_llm:LLM.generate_async": ("inputs", "sampling_params"),
        _RELOAD: ("model", "weights", "allow_partial_loading"),
    }


@dataclass(frozen=True)
class Version:
    """`prefix`: of the version string. `refused`: why the engine does not run on it."""

    prefix: str
    symbols: tuple[str, ...]
    arguments: dict[str, tuple[str, ...]]  # symbol -> names it must accept
    sleep_argument: str = ""
    processed_logprobs: bool = False  # SamplingParams.logprobs_mode
    request_seeds: bool = False  # SamplingParams.seed decides a sample, whatever runs beside it
    min_p: bool = False
    sleep_config: bool = False  # sleep knows CUDA graphs, and releases weights without a copy on the host
    refused: str = ""


_SLEEPING = Version(
    "1.3",
    _SYMBOLS + _RELOAD_SYMBOLS + _SLEEP_SYMBOLS + (*_SLEEP_CONFIG, _LOGPROB_MODE),
    _arguments("sleep_config", "logprobs_mode"),
    "sleep_config",
    processed_logprobs=True,
    sleep_config=True,
)
VERSIONS = (
    Version(
        "1.1",
        _SYMBOLS + _SLEEP_SYMBOLS,
        {k: v for k, v in _arguments("enable_sleep").items() if k != _RELOAD},
        "enable_sleep",
        refused="its weights cannot be replaced after loading (no ModelLoader.reload); 1.2 and later can",
    ),
    Version("1.2", _SYMBOLS + _RELOAD_SYMBOLS + _SLEEP_SYMBOLS, _arguments("enable_sleep"), "enable_sleep"),
    _SLEEPING,
    replace(_SLEEPING, prefix="1.4", request_seeds=True, min_p=True),
)
NOT_RUN = (
    "creating an engine from config.json with load_format=dummy",
    "partial reloads, finalising and the prefix cache on a GPU",
    "CUDA IPC between trainer and child",
    "release and return of the KV cache",
    "logprobs of a real sampler against the trainer's (the sentinel does that in every run)",
)


def version_row(version: str) -> Version:
    """The row of an installed version. Raises ConfigError for one that is not in the table or is refused."""
    return require_row(version, VERSIONS, "trtllm")


def require_row(version: str, table: Sequence[Version], name: str) -> Version:
    row = find_row(version, table)
    known = ", ".join(v.prefix for v in table if not v.refused)
    if row is None:
        raise ConfigError("engine.name", name, f"TensorRT-LLM {known}", f"Installed is {version}.")
    if row.refused:
        raise ConfigError("engine.name", name, f"TensorRT-LLM {known}", f"Of {version} {row.refused}.")
    return row


def find_row(version: str, table: Sequence[Version] = VERSIONS) -> Version | None:
    return next((v for v in table if version.split("+")[0].startswith(v.prefix + ".")), None)


@dataclass
class Findings:
    """What an installed package has of a row of the table."""

    version: str = ""
    row: str = ""  # "" where the version is not in the table: then compared with the newest row
    refused: str = ""
    present: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    error: str = ""  # why the package could not be imported


def resolve(symbol: str) -> Any:
    """The object "module:attribute.attribute". Raises ImportError or AttributeError."""
    module, _, path = symbol.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def accepted(thing: Any) -> set[str]:
    """Names a callable, a dataclass or a pydantic model takes, or has as properties."""
    fields = getattr(thing, "model_fields", None)
    if fields is not None:
        return set(fields)
    properties = (
        {name for name, value in vars(thing).items() if isinstance(value, property)} if isclass(thing) else set()
    )
    return set(inspect.signature(thing).parameters) | properties


def compare(table: Sequence[Version] = VERSIONS, not_run: Sequence[str] = NOT_RUN) -> Findings:
    """Imports tensorrt_llm: run it in a process of its own, without the launcher's variables. A version that is not in
    the table is compared with the last row that is not refused."""
    found = Findings(not_run=list(not_run))
    try:
        import tensorrt_llm
    except Exception as error:  # a broken CUDA or MPI underneath raises anything; it is the finding
        found.error = f"{type(error).__name__}: {error}"
        return found
    found.version = tensorrt_llm.__version__
    row = find_row(found.version, table)
    found.row = row.prefix if row else ""
    row = row or [v for v in table if not v.refused][-1]
    found.refused = row.refused
    for symbol in row.symbols:
        try:
            resolve(symbol)
        except (ImportError, AttributeError):
            found.missing.append(symbol)
        else:
            found.present.append(symbol)
    for symbol, names in row.arguments.items():
        try:
            has = accepted(resolve(symbol))
        except (ImportError, AttributeError):
            has = set()
        for name in names:
            (found.present if name in has else found.missing).append(f"{symbol}({name})")
    return found


if __name__ == "__main__":
    report = json.dumps(asdict(compare()))
    sys.stdout.write(f"\n{report}\n")  # the package prints a banner
