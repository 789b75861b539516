"""One TensorRT-LLM engine, or one rank of it, in the process that it runs in: the trainer's calls to it.

The engine runs in this process (TLLM_WORKER_USE_SINGLE_PROCESS=1, or `executor.py`): so its executor, and with it the
weights, can be reached. On all ranks a call enters one control action, and no work comes before it: an executor whose
process stays out of one waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.arguments import checked_arguments
from aligner.engines.child.buckets import Slot
from aligner.engines.child.ranks import RankWorker
from aligner.engines.child.serve import Abort
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, LocalWorker, Progress, Row, Settings
from aligner.engines.native.sampler import picked_logprobs
from aligner.engines.trtllm.executor import executor_class
from aligner.engines.trtllm.features import ARGS, NAME, REFIT, SAMPLER, TAGS, features
from aligner.engines.trtllm.package import Installed, resolve
from aligner.engines.trtllm.sampling import NO_END_ID, RAW, ended, logprob_source, sampling_arguments
from aligner.engines.trtllm.torch_api import version_row
from aligner.errors import ConfigError, EngineError
from aligner.types import SamplingParams

_LOOKED_UP = 4  # last tokens of a row, at most, that are looked up


def engine_arguments(settings: Settings, has: Container[str]) -> dict[str, Any]:
    """Return keyword arguments of `tensorrt_llm.LLM`."""
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig

    graphs = CudaGraphConfig(max_batch_size=settings.max_batch, enable_padding=True) if settings.cuda_graphs else None
    arguments = {
        "model": settings.folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": settings.tensor_parallel,
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
    if settings.tensor_parallel > 1:
        arguments |= _rank_arguments(has, settings.tensor_parallel)
    if settings.draft_tokens:
        arguments["speculative_config"] = _lookup(has, settings.draft_tokens)
    if settings.sleep:
        arguments |= _sleep_argument(has, settings.sleep_weights, settings.cuda_graphs)
    return arguments


def _rank_arguments(has: Container[str], ranks: int) -> dict[str, Any]:
    from tensorrt_llm import __version__

    if "ranks" not in has:
        expected = f"1 with TensorRT-LLM {__version__}, whose ranks cannot be started one by one"
        raise ConfigError("engine.tensor_parallel", ranks, expected, "The doctor names what is missing.")
    return {"orchestrator_type": "ray", "executor_cls": executor_class()}  # ray: without MPI, none is started


def _lookup(has: Container[str], tokens: int) -> Any:
    """Return the configuration of prompt lookup. Each row has a pool of its own: a common one never forgets, and what
    it drafts for a row depends on other rows."""
    from tensorrt_llm import __version__

    if "drafts" not in has:
        expected = f"0 with TensorRT-LLM {__version__}, whose way to draft is not supported"
        raise ConfigError("engine.draft_tokens", tokens, expected, "The doctor names what is missing.")
    from tensorrt_llm.llmapi import NGramDecodingConfig

    return NGramDecodingConfig(max_draft_len=tokens, max_matching_ngram_size=_LOOKED_UP, is_public_pool=False)


def _sleep_argument(has: Container[str], weights: bool, graphs: bool) -> dict[str, Any]:
    from tensorrt_llm import __version__

    if weights and "weights_tag" not in has:
        expected = f"false with TensorRT-LLM {__version__}, which has no tag for weights alone"
        raise ConfigError("engine.sleep_weights", True, expected)
    if "sleep_config" not in has:
        if "enable_sleep" not in has:
            expected = f"false with TensorRT-LLM {__version__}, whose way to sleep is not supported"
            raise ConfigError("engine.sleep", True, expected)
        if graphs:
            expected = f"false with engine.sleep and TensorRT-LLM {__version__}, whose graphs do not survive it"
            raise ConfigError("engine.cuda_graphs", True, expected, "Or engine.sleep=false.")
        return {"enable_sleep": True}
    from tensorrt_llm.llmapi.llm_args import SleepConfig

    kinds = resolve(TAGS)
    modes = {kinds.KV_CACHE: "NONE"}
    if weights:
        modes[kinds.MODEL_WEIGHTS_MAIN] = "NONE"  # by default they are copied to the host
    return {"sleep_config": SleepConfig(restore_modes=modes)}


def memory_tags(tags: list[str], has: Container[str]) -> list[str]:
    """Return the tags of memory to release. With the KV cache all other memory that has a tag goes (workspaces,
    pools of graphs), but weights, a draft model's too, stay. Where sleep has no config, tags of other memory may be
    those of weights."""
    if "sleep_config" not in has or KV_CACHE not in tags:
        return tags
    every = [kind.value for kind in resolve(TAGS)]
    return [*tags, *(tag for tag in every if not tag.startswith("_") and not tag.endswith((WEIGHTS, KV_CACHE)))]


class Worker(RankWorker, LocalWorker):
    """A worker with one method per call."""

    def _start(self, settings: Settings) -> None:
        import tensorrt_llm

        self.api = tensorrt_llm
        self.row = version_row(tensorrt_llm.__version__)
        self.features = features(Installed(NAME))
        version = f"TensorRT-LLM {tensorrt_llm.__version__}"
        args = checked_arguments(f"{TrtllmConfig.KEY}.args", settings.args, resolve(ARGS), version)
        self.llm = tensorrt_llm.LLM(**engine_arguments(settings, self.features), **args)
        executor = getattr(self.llm, "_executor", None)
        self.executor = getattr(executor, "engine", None)
        if self.executor is None:
            raise EngineError(
                f"TensorRT-LLM {tensorrt_llm.__version__} runs its executor in another process: {type(executor)} has "
                "no `engine`, so its weights cannot be reached"
            )
        if settings.draft_tokens:
            self._check_sampler(settings.draft_tokens)
        self.model = self.executor.model_engine.model
        self.loader = self.executor.model_engine.model_loader
        self.partial = "allow_partial_loading" in inspect.signature(self.model.load_weights).parameters
        self._collected: dict[str, Tensor] = {}
        self._begun = False
        self._away: list[str] = []  # tags of memory that sleep has released
        self._drafts = [0, 0]  # since `take_drafts`

    def _check_sampler(self, tokens: int) -> None:
        """Raise ConfigError unless the default sampler itself verifies drafts: others, which may be made of it, give no
        logprobs."""
        kind = type(getattr(self.executor, "sampler", None))
        if kind is not resolve(SAMPLER):
            expected = f"0 with TensorRT-LLM {self.api.__version__}, whose {kind.__name__} would verify drafts"
            hint = "TorchSampler alone gives logprobs of them."
            raise ConfigError("engine.draft_tokens", tokens, expected, hint)

    def describe(self) -> dict[str, Any]:
        description = {"version": self.api.__version__, "partial": self.partial, "score_rows": 1}
        return description | {"features": sorted(self.features)}

    # ---- weights

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Run one step of an update, while no request runs. If it fails, the loader forgets the update so far."""
        with self.executor.control_action():
            try:
                yield
            except BaseException:
                self._abort()
                raise

    def _abort(self) -> None:
        if self._begun and "update_hooks" in self.features:
            with suppress(Exception):  # the first error is the cause to report
                self.loader.abort_update_weights()
        self._begun = False

    def _each_module(self, *methods: str) -> None:
        for module in self.model.modules():
            for method in methods:
                if hasattr(module, method) and not getattr(module, "_weights_removed", False):
                    getattr(module, method)()

    def begin(self) -> None:
        self.whole = False
        self._collected, self._checksums = {}, {}
        with self._updating():
            self._return(cache=False)
            self._abort()  # an abandoned update
            if "update_hooks" in self.features:
                self.loader.begin_update_weights()
            self._begun = True
            self._each_module("pre_reload_weights")

    def take(self, slots: list[Slot]) -> dict[str, int]:
        with self._updating():
            return super().take(slots)

    def load(self, tensors: dict[str, Tensor]) -> None:
        if self.partial:
            self.loader.reload(self.model, tensors, allow_partial_loading=True)
        else:  # this model loads all its weights or none
            kept = self.settings.lasting
            self._collected |= {name: tensor if kept else tensor.clone() for name, tensor in tensors.items()}

    def finish(self) -> None:
        with self._updating():
            if self._collected:
                self.loader.reload(self.model, self._collected, allow_partial_loading=False)
                self._collected = {}
            self._finalize()
            self.executor.reset_prefix_cache()  # keys and values of the old weights
            self._synchronize()
            self._give_back()
        self.whole, self._begun = True, False

    def _finalize(self) -> None:
        """Put the loaded weights into effect, where graphs and kernels read them."""
        if "finalize" in self.features:
            resolve(REFIT)(SimpleNamespace(engine=self.executor))  # it needs nothing else of its worker
        else:
            if "update_hooks" in self.features:
                self.loader.finalize_update_weights()
            self._each_module("process_weights_after_loading", "post_load_weights")
        balancer = getattr(self.executor.model_engine, "moe_load_balancer", None)
        if balancer is not None and "balancer" in self.features:
            balancer.register_weight_slots_after_to_cuda()
            balancer.finalize_model()

    # ---- memory

    def sleep(self, tags: list[str]) -> None:
        if WEIGHTS in tags:
            self.whole = False
        with self.executor.control_action():
            from tensorrt_llm._torch.virtual_memory import release_with_tag

            self._synchronize()
            self._away = memory_tags(tags, self.features)
            release_with_tag(*self._away)
            self._synchronize()
            self._give_back()

    def wake(self, tags: list[str]) -> None:
        with self.executor.control_action():
            self._return(cache=KV_CACHE in tags)
            if KV_CACHE in tags:
                self.executor.reset_prefix_cache()  # the contents of its blocks are gone
            self._synchronize()

    def _return(self, cache: bool) -> None:
        """Return all released memory, the cache's only with `cache`: an update does not need it."""
        from tensorrt_llm._torch.virtual_memory import materialize_with_tag

        if back := [tag for tag in self._away if cache or tag != KV_CACHE]:
            materialize_with_tag(*back)
        self._away = [tag for tag in self._away if tag not in back]

    # ---- generation

    def generate(
        self, requests: list[tuple[list[int], int]], sampling: SamplingParams, progress: Progress, aborted: Abort
    ) -> list[Row] | None:
        """Return a row per (prompt, seed); None if it was aborted. Logprobs are None where the sampler's are not the
        ones wanted, or are not of the sampled tokens."""
        self._require()
        drafts = bool(self.settings.draft_tokens)
        arguments = sampling_arguments(sampling, self.row, self.features, self.settings.pad_id, drafts)
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
                self._count(future, done[-1])
                progress(len(done))
        if aborted.asked:
            return None
        wanted = logprob_source(sampling, self.features) == RAW or "logprobs_mode" in arguments
        rows = [self._row(output, wanted) for output in done]
        return [(*ended(*row[:3], sampling.stop_token_ids), row[3]) for row in rows]

    def _count(self, future: Any, output: Any) -> None:
        """Count a request's passes that could keep drafted tokens, and those tokens: its first pass read the prompt."""
        if passes := getattr(future, "decoding_iter", 0):
            self._drafts[0] += passes - 1
            self._drafts[1] += len(output.token_ids) - passes

    def take_drafts(self) -> list[int]:
        """Return the rows' passes with drafts since the last call, and accepted tokens."""
        drafts, self._drafts = self._drafts, [0, 0]
        return drafts

    def score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Return for the row (tokens, first) logprobs of tokens[first:] given those before, of the tempered full
        distribution and of the one that `sampling` samples from. Only the first rank's are used."""
        self._require()
        with self.executor.control_action():
            self.executor.reset_prefix_cache()  # reused positions come without logits
        return [self._score(*row, sampling) for row in rows] if self.settings.rank == 0 else []

    def _score(self, tokens: list[int], first: int, sampling: SamplingParams) -> tuple[list[float], list[float]]:
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

    def _end(self) -> None:
        self.llm.shutdown()
