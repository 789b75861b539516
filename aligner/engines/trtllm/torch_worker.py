"""One TensorRT-LLM engine, in the process that it runs in: what each call of the trainer does to it.

The engine runs in this process (TLLM_WORKER_USE_SINGLE_PROCESS=1): that is how its executor, and with it the weights,
can be reached under MPI.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from aligner.engines.child.serve import Abort
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, LocalWorker, Progress, Row, Settings
from aligner.engines.native.sampler import picked_logprobs
from aligner.engines.trtllm.sampling import NO_END_ID, RAW, logprob_source, sampling_arguments
from aligner.engines.trtllm.torch_api import Version, version_row
from aligner.errors import ConfigError, EngineError
from aligner.types import SamplingParams


def engine_arguments(settings: Settings, row: Version) -> dict[str, Any]:
    """Keyword arguments of `tensorrt_llm.LLM`."""
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig

    graphs = CudaGraphConfig(max_batch_size=settings.max_batch, enable_padding=True) if settings.cuda_graphs else None
    found = {
        "model": settings.folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "dtype": settings.dtype,
        "max_input_len": settings.max_seq_len,  # its default, 1024, refuses longer prompts
        "max_seq_len": settings.max_seq_len,
        "max_batch_size": settings.max_batch,
        "max_num_tokens": settings.max_num_tokens,
        "kv_cache_config": KvCacheConfig(
            enable_block_reuse=settings.prefix_reuse, max_gpu_total_bytes=settings.kv_cache_bytes
        ),
        "cuda_graph_config": graphs,
        "allreduce_strategy": "NCCL",
    }
    if settings.sleep:
        found[row.sleep_argument] = _sleep_value(row, settings.sleep_weights, settings.cuda_graphs)
    return found


def _sleep_value(row: Version, weights: bool, graphs: bool) -> Any:
    if graphs and not row.sleep_config:
        expected = f"false with engine.trtllm.sleep and TensorRT-LLM {row.prefix}, whose graphs do not survive it"
        raise ConfigError("engine.trtllm.cuda_graphs", True, expected, "Or engine.trtllm.sleep=false.")
    if weights and not row.sleep_config:
        expected = f"false with TensorRT-LLM {row.prefix}, which has no tag for weights alone"
        raise ConfigError("engine.trtllm.sleep_weights", True, expected)
    if not row.sleep_config:
        return True
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig

    modes = {ExecutorMemoryType.KV_CACHE: "NONE"}
    if weights:
        modes[ExecutorMemoryType.MODEL_WEIGHTS_MAIN] = "NONE"  # by default they are copied to the host
    return SleepConfig(restore_modes=modes)


class Worker(LocalWorker):
    """One method per call."""

    def __init__(self, settings: Settings):
        import tensorrt_llm

        self.api = tensorrt_llm
        self.row = version_row(tensorrt_llm.__version__)
        self.llm = tensorrt_llm.LLM(**engine_arguments(settings, self.row))
        executor = getattr(self.llm, "_executor", None)
        self.executor = getattr(executor, "engine", None)
        if self.executor is None:
            raise EngineError(
                f"TensorRT-LLM {tensorrt_llm.__version__} runs its executor in another process: {type(executor)} has "
                "no `engine`, so its weights cannot be reached"
            )
        self.model = self.executor.model_engine.model
        self.loader = self.executor.model_engine.model_loader
        self.partial = "allow_partial_loading" in inspect.signature(self.model.load_weights).parameters
        self._collected: dict[str, Tensor] = {}
        super().__init__(settings)

    def describe(self) -> dict[str, Any]:
        return {"version": self.api.__version__, "partial": self.partial, "score_rows": 1}

    # ---- weights

    def _each_module(self, *methods: str) -> None:
        for module in self.model.modules():
            for method in methods:
                if hasattr(module, method) and not getattr(module, "_weights_removed", False):
                    getattr(module, method)()

    def begin(self) -> None:
        self.whole = False
        self._collected, self._checksums = {}, {}
        with self.executor.control_action():
            self._each_module("pre_reload_weights")

    def load(self, tensors: dict[str, Tensor]) -> None:
        if self.partial:
            self._reload(tensors, allow_partial_loading=True)
        else:  # this model loads all its weights or none
            self._collected |= {name: tensor.clone() for name, tensor in tensors.items()}

    def _reload(self, tensors: dict[str, Tensor], allow_partial_loading: bool) -> None:
        with self.executor.control_action():
            self.loader.reload(self.model, tensors, allow_partial_loading=allow_partial_loading)

    def finish(self) -> None:
        if self._collected:
            self._reload(self._collected, allow_partial_loading=False)
            self._collected = {}
        with self.executor.control_action():
            self._each_module("process_weights_after_loading", "post_load_weights")
            self.executor.reset_prefix_cache()  # keys and values of the old weights
            self._synchronize()
            self._give_back()
        self.whole = True

    # ---- memory

    def sleep(self, tags: list[str]) -> None:
        from tensorrt_llm._torch.virtual_memory import release_with_tag

        if WEIGHTS in tags:
            self.whole = False
        with self.executor.control_action():
            self._synchronize()
            release_with_tag(*tags)
            self._synchronize()
            self._give_back()

    def wake(self, tags: list[str]) -> None:
        from tensorrt_llm._torch.virtual_memory import materialize_with_tag

        with self.executor.control_action():
            materialize_with_tag(*tags)
            if KV_CACHE in tags:
                self.executor.reset_prefix_cache()  # what its blocks held is gone
            self._synchronize()

    # ---- generation

    def generate(
        self, requests: list[tuple[list[int], int]], sampling: SamplingParams, progress: Progress, aborted: Abort
    ) -> list[Row] | None:
        """A row per (prompt, seed); None if it was aborted. Logprobs are None where the sampler's are not the ones
        wanted, or are not of the sampled tokens."""
        self._require()
        arguments = sampling_arguments(sampling, self.row, self.settings.pad_id)
        if "logprobs_mode" in arguments:
            from tensorrt_llm.sampling_params import LogprobMode

            arguments["logprobs_mode"] = LogprobMode.PROCESSED
        make = self.api.SamplingParams
        futures: list[Any] = []
        with aborted.watching(futures):
            for prompt, seed in requests:
                futures.append(self.llm.generate_async(prompt, make(**arguments, seed=seed)))
            done = []
            for future in futures:
                done.append(future.result().outputs[0])
                progress(len(done))
        if aborted.asked:
            return None
        wanted = logprob_source(sampling, self.row)
        return [self._row(output, wanted == RAW or "logprobs_mode" in arguments) for output in done]

    def score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Per (tokens, first): logprobs of tokens[first:] given those before, of the tempered full distribution and of
        the one that `sampling` samples from."""
        self._require()
        return [self._score(tokens, first, sampling) for tokens, first in rows]

    def _score(self, tokens: list[int], first: int, sampling: SamplingParams) -> tuple[list[float], list[float]]:
        with self.executor.control_action():
            self.executor.reset_prefix_cache()  # reused positions come without logits
        params = self.api.SamplingParams(
            end_id=NO_END_ID,
            pad_id=self.settings.pad_id,
            max_tokens=1,
            temperature=1.0,
            top_k=1,
            top_p=1.0,
            detokenize=False,
            return_context_logits=True,
        )
        logits = self.llm.generate_async(tokens[:-1], params).result().context_logits
        if logits is None or len(logits) != len(tokens) - 1:
            got = "none" if logits is None else f"{len(logits)}"
            raise EngineError(f"{got} rows of context logits for {len(tokens) - 1} tokens: expected one for each")
        logits = logits[first - 1 :, : self.settings.vocab_size].float()
        full, cut = picked_logprobs(logits, torch.tensor(tokens[first:], device=logits.device), sampling)
        return full.tolist(), cut.tolist()

    def close(self) -> None:
        self.llm.shutdown()
