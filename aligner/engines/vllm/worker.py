"""One vLLM engine, in the process that it runs in: the trainer's calls to it.

The engine's core runs in this process; its workers too, or, with several ranks, in processes of their own.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from aligner.config.sections.vllm import VERSION, VllmConfig, same_minor
from aligner.engines.base import listed
from aligner.engines.child.arguments import checked_arguments
from aligner.engines.child.buckets import Slot
from aligner.engines.child.serve import Abort
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, BaseWorker, Progress, Row, Settings
from aligner.engines.vllm.sampling import sampling_arguments
from aligner.errors import ConfigError, EngineError, RefitError
from aligner.loading import for_good
from aligner.types import SamplingParams

_TAGS = {KV_CACHE: "kv_cache", WEIGHTS: "weights"}
# share of a device that must be free when vLLM starts: the rest is the trainer's, and the cache has its own size
_FREE = 0.01
_EXTENSION = "aligner.engines.vllm.extension.Extension"


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Return keyword arguments of `vllm.LLM`."""
    return {
        "model": settings.folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "seed": 0,  # requests have their own
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "max_model_len": settings.max_seq_len + 1,  # a row that is scored is followed by one token, which is dropped
        "max_num_seqs": settings.max_batch,
        "max_num_batched_tokens": settings.max_num_tokens,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "gpu_memory_utilization": _FREE,
        "block_size": settings.block,
        "enable_prefix_caching": settings.prefix_reuse,
        # on a CPU vLLM fails at a prompt that a pass cuts: it sets its generator's offset, which only CUDA has
        "enable_chunked_prefill": torch.cuda.is_available(),
        "enable_sleep_mode": settings.sleep,
        "enforce_eager": not settings.cuda_graphs,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
    }


@cache
@for_good()
def import_vllm() -> Any:
    """Import vLLM. Raises ConfigError where it is missing or of another minor version than the supported one."""
    try:
        import vllm
    except ImportError as error:
        hint = f"launchers/engine_env.sh vllm makes one. {error}"
        raise ConfigError(f"{VllmConfig.KEY}.python", sys.executable, "an interpreter with vLLM", hint) from error
    if not same_minor(vllm.__version__):
        remedy = f"Installed is {vllm.__version__}; launchers/engine_env.sh vllm makes an environment with it."
        raise ConfigError("engine.name", "vllm", f"vLLM {VERSION}", remedy)
    vllm.LLM  # noqa: B018 (imported, with nearly all of the package, when it is asked for)
    return vllm


def import_architectures(api: Any, folder: str) -> None:
    """Import the architectures in the config.json of `folder`, on a CPU. Otherwise vLLM inspects them in a separate
    process, to avoid starting CUDA here, which takes as long again as its own start."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        models = api.ModelRegistry.models
        for name in json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("architectures", ()):
            if name in models:  # vLLM says which it has
                api.ModelRegistry.register_model(name, models[name].load_model_cls())


class VllmWorker(BaseWorker):
    """A worker with one method per call."""

    def __init__(self, settings: Settings):
        self.api = import_vllm()
        import_architectures(self.api, settings.folder)
        from vllm.engine.arg_utils import EngineArgs

        version = f"vLLM {self.api.__version__}"
        args = checked_arguments(f"{VllmConfig.KEY}.args", settings.args, EngineArgs, version)
        if not torch.cuda.is_available() and "attention_backend" not in args:
            # else vLLM's latent attention with AMX, which takes only some sizes
            args = {"attention_config": {"backend": "CPU_MLA"}, **args}
        if not torch.cuda.is_available():
            # whose kernel on a CPU misreads keys that are part of a latent vector
            args = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, **args}
        self.engine = self.api.LLM(**engine_arguments(settings), **args).llm_engine
        super().__init__(settings)
        self._rpc("aligner_open", settings.memories, settings.lasting)
        self._requests, self._temperature = 0, 1.0

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on each rank of the engine; return their results."""
        return self.engine.collective_rpc(method, args=arguments)

    def describe(self) -> dict[str, Any]:
        return {"version": self.api.__version__, "score_rows": self.settings.max_batch}

    # ---- weights

    def begin(self) -> None:
        self.whole, self._checksums = False, {}
        self._rpc("aligner_begin")

    def take(self, slots: list[Slot]) -> dict[str, int]:
        first, *others = [sums for sums in self._rpc("aligner_take", slots, self.settings.checksums) if sums] or [{}]
        for other in others:
            if wrong := [name for name, value in first.items() if other[name] != value]:
                raise RefitError(f"the ranks of the engine received different values of {listed(wrong)}")
        return first

    def finish(self) -> None:
        self._rpc("aligner_finish")
        if not self.engine.reset_prefix_cache(reset_connector=True):
            raise EngineError("vLLM did not reset its prefix cache: it holds keys and values of the old weights")
        self.whole = True

    # ---- memory

    def sleep(self, tags: list[str]) -> None:
        if WEIGHTS in tags:
            self.whole = False
            self.engine.sleep(level=2)
        else:
            self.engine.sleep(level=0)  # stop scheduling first, as the release requires
            self.engine.release_kv_cache_memory()

    def wake(self, tags: list[str]) -> None:
        self.engine.wake_up([_TAGS[tag] for tag in tags])

    # ---- generation

    def generate(
        self, requests: list[tuple[list[int], int]], sampling: SamplingParams, progress: Progress, aborted: Abort
    ) -> list[Row] | None:
        """Return a row per (prompt, seed); None if it was aborted."""
        self._require()
        make, common = self.api.SamplingParams, sampling_arguments(sampling)
        asked = [(prompt, make(**common, seed=seed)) for prompt, seed in requests]
        with aborted.watching([]):
            outputs = self._run(asked, progress, aborted)
        return None if outputs is None else [self._row(output.outputs[0]) for output in outputs]

    def _run(
        self, asked: list[tuple[list[int], Any]], progress: Progress, aborted: Abort | None = None
    ) -> list[Any] | None:
        """Return outputs in the order of `asked`; None if it was aborted."""
        names = [str(self._requests + i) for i in range(len(asked))]
        self._requests += len(asked)
        done: dict[str, Any] = {}
        try:
            for name, (prompt, parameters) in zip(names, asked, strict=True):
                self.engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
            while self.engine.has_unfinished_requests():
                before = len(done)
                done |= {output.request_id: output for output in self.engine.step() if output.finished}
                if aborted is not None and aborted.asked:
                    return None
                if len(done) > before:
                    progress(len(done))
        finally:
            if left := [name for name in names if name not in done]:
                self.engine.abort_request(left)
        return [done[name] for name in names]

    def score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Return, per (tokens, first), logprobs of tokens[first:] given those before, of the tempered full
        distribution (twice: those of the cut one came from the sampler)."""
        self._require()
        temperature = sampling.temperature or 1.0
        if temperature != self._temperature:
            self._rpc("aligner_temper", temperature)
            self._temperature = temperature
        one = self.api.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run([(tokens, one) for tokens, _ in rows], lambda done: None)
        scores = []
        for output, (tokens, first) in zip(outputs, rows, strict=True):
            entries = output.prompt_logprobs[first:]
            full = [entry[token].logprob for entry, token in zip(entries, tokens[first:], strict=True)]
            scores.append((full, full))
        return scores

    def close(self) -> None:
        self.engine.engine_core.shutdown()
