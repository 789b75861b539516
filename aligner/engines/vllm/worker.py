"""One vLLM engine, or one rank of it, in the process that it runs in: the trainer's calls to it.

Each rank has vLLM's scheduler and one worker in its process ("external launcher"). All get the same requests and make
the same steps, in which the workers meet. After each step the ranks agree whether to go on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.vllm import VERSION, VllmConfig, request_shares, same_minor
from aligner.engines.child.arguments import checked_arguments
from aligner.engines.child.buckets import Slot
from aligner.engines.child.ranks import RankWorker, ending_all
from aligner.engines.child.serve import Abort
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, Progress, Row, Settings
from aligner.engines.vllm.drafter import METHODS
from aligner.engines.vllm.sampling import sampling_arguments
from aligner.errors import ConfigError, EngineError
from aligner.families.draft_folder import KEY, MARK, EagleHead
from aligner.loading import for_good
from aligner.ops.reduce import gathered_messages, of_each_rank
from aligner.types import SamplingParams

_TAGS = {KV_CACHE: "kv_cache", WEIGHTS: "weights"}
# share of a device that must be free when vLLM starts: the rest is the trainer's, and the cache has its own size
_FREE = 0.01
DRAWN = "probabilistic"  # a model's drafts are drawn at the row's temperature, as its tokens are
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
        "tensor_parallel_size": settings.tensor_parallel // request_shares(settings.args, settings.tensor_parallel),
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "external_launcher",
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
        # no refit brings them: without a copy they would be lost where the weights are released
        "sleep_preserve_parameter_names": ["draft.*"] if settings.draft_folder else [],
        "enforce_eager": not settings.cuda_graphs,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
        "enable_return_routed_experts": bool(settings.routed_layers),
        "speculative_config": drafter(settings),
        "per_request_spec_decode_metrics": "summary" if settings.draft_tokens else "none",
    }


def drafter(settings: Settings) -> dict[str, Any] | None:
    """Return what drafts, as in the native engine: another model, the model's own layer, or the text of each row."""
    if not settings.draft_tokens:
        return None
    chosen = {} if torch.cuda.is_available() else {"attention_backend": "CPU_MLA"}  # as of the model
    if settings.draft_folder:
        chosen |= {"method": settings.draft_method, "model": settings.draft_folder, "draft_sample_method": DRAWN}
        chosen["draft_load_config"] = {"load_format": "auto"}  # its own weights, not any as of the model
    elif settings.drafts_ahead:
        chosen["method"] = "mtp"
    else:
        chosen = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return chosen | {"num_speculative_tokens": settings.draft_tokens}


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


def import_architectures(api: Any, settings: Settings) -> None:
    """Import the architectures of the model and of what drafts, on a CPU. Otherwise vLLM inspects them in a separate
    process, to avoid starting CUDA here, which takes as long again as its own start."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        models = api.ModelRegistry.models
        names = _own_architectures(settings)
        if settings.draft_tokens and (settings.draft_folder or settings.drafts_ahead):
            names += _drafting_architectures(settings)
        for name in names:
            if name in models:  # vLLM says which it has
                api.ModelRegistry.register_model(name, models[name].load_model_cls())


def _own_architectures(settings: Settings) -> list[str]:
    return json.loads((Path(settings.folder) / "config.json").read_text(encoding="utf-8")).get("architectures", [])


def _drafting_architectures(settings: Settings) -> list[str]:
    from vllm.config import SpeculativeConfig
    from vllm.transformers_utils.config import get_config

    if settings.draft_folder:  # of which vLLM renames some
        return list(get_config(settings.draft_folder, False).architectures or [])
    return list(SpeculativeConfig.hf_config_override(get_config(settings.folder, False)).architectures)


def check_head(api: Any, settings: Settings) -> None:
    """Raise ConfigError unless vLLM has the EAGLE-3 head, and its model gives such a head its hidden states."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    models, hint = api.ModelRegistry.models, f"vLLM {api.__version__}"
    if not set(_drafting_architectures(settings)) & models.keys():
        known = ", ".join(name for name in models if MARK in name)
        raise ConfigError(KEY, settings.draft_folder, f"a head that {hint} has: {known}")
    for name in _own_architectures(settings):
        if name in models and not supports_eagle3(models[name].load_model_cls()):
            raise ConfigError(KEY, settings.draft_folder, f"a smaller model: {name} of {hint} takes no EAGLE-3 head")


@cache
def read_draft_model() -> None:
    """Let vLLM read a smaller model from its folder. It only asks for `draft_load_config` where it reads a head, and
    would give any other model random weights, as its model has until a refit."""
    from vllm.v1.spec_decode import draft_model

    load = draft_model.get_model
    draft_model.get_model = lambda vllm_config, prefix: load(
        vllm_config=vllm_config, prefix=prefix, load_config=vllm_config.speculative_config.draft_load_config
    )


@cache
def seed_drafts() -> None:
    """Let vLLM draw a draft with the row's own generator. It draws drafts of all rows with one that has no seed."""
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample
    from vllm.v1.spec_decode import llm_base_proposer

    def draw(logits: Tensor, sampling: Any, *noise: Any) -> tuple[Tensor, Tensor]:
        probabilities = (logits / sampling.temperature[:, None]).softmax(-1, dtype=torch.float32)
        return random_sample(probabilities.clone(), sampling.generators, *noise), probabilities

    llm_base_proposer.compute_probs_and_sample_next_token = draw


@cache
def leave_out_others_experts() -> None:
    """Let the kernel of vLLM's CPU build leave out experts of other ranks. It takes every expert's number for that of
    one of its own, and reads past them."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = CPUUnquantizedExperts.apply

    def apply(self: Any, *, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, **others: Any) -> None:
        if expert_map is not None:  # from an expert's number to its own, or to -1
            own = expert_map[topk_ids]
            topk_ids, topk_weights = own.clamp_min(0).to(topk_ids.dtype), topk_weights * (own >= 0)
        plain(self, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **others)

    CPUUnquantizedExperts.apply = apply


@cache
def expand_temperatures() -> None:
    """Let vLLM's CPU build give each drafted token the temperature and top_p of its row. It takes them for whole
    numbers, and writes them to a copy."""
    from vllm.v1.sample import rejection_sampler

    def expand(values: Tensor, ends: Tensor, count: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
        values = torch.where(values == replace_from, replace_to, values)
        return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=count)

    rejection_sampler.expand_batch_to_tokens = expand


@cache
def reject_placeholders() -> None:
    """Let vLLM's CPU build reject the drafts -1, with which it fills up rows that have none. Its kernel may keep them:
    then the row loses a token."""
    from vllm.utils import cpu_triton_utils

    accept = cpu_triton_utils._rejection_random_sample_kernel_impl

    def accept_tokens(*tensors: Any, **options: Any) -> None:
        output, ends, drafts, *distributions, uniform = tensors[:8]
        uniform = uniform.masked_fill(drafts < 0, torch.inf)
        accept(output, ends, drafts.clamp_min(0), *distributions, uniform, *tensors[8:], **options)

    cpu_triton_utils._rejection_random_sample_kernel_impl = accept_tokens


def tell_rank(settings: Settings) -> None:
    """Let vLLM find this rank and its device, which a launcher would tell. The process group is there already. Its CPU
    build names shared memory after the end of the address: ranks of other engines or nodes have another one."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    assert settings.meeting is not None
    hosts, (port, _) = settings.meeting.hosts, settings.meeting.ports
    address = f"tcp://{hosts[0]}:{port}-{hosts[settings.rank]}"
    ExecutorWithExternalLauncher._distributed_args = lambda executor: (address, settings.rank, settings.device)
    os.environ["RANK"] = str(settings.rank)  # for its data parallelism


class VllmWorker(RankWorker):
    """A worker with one method per call."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._shares = request_shares(settings.args, settings.tensor_parallel)
        self._width = settings.tensor_parallel // self._shares  # ranks with the same requests
        self._unlike = self.line if self._shares > 1 else None  # to ranks that may not have the same error
        self._requests, self._temperature = 0, 1.0
        self._routed: Tensor | None = None  # of the last `generate`
        self._steps, self._drafts = 0, torch.zeros(4, dtype=torch.int64)  # the latter since `take_drafts`

    def _start(self, settings: Settings) -> None:
        self.api = import_vllm()
        import_architectures(self.api, settings)
        from vllm.engine.arg_utils import EngineArgs

        if self.line is not None:
            tell_rank(settings)
            if not torch.cuda.is_available():
                leave_out_others_experts()
        version = f"vLLM {self.api.__version__}"
        args = checked_arguments(f"{VllmConfig.KEY}.args", settings.args, EngineArgs, version)
        if settings.draft_tokens and not torch.cuda.is_available():
            expand_temperatures()
            reject_placeholders()
        if settings.draft_folder:
            if settings.draft_method == METHODS[EagleHead]:
                check_head(self.api, settings)
            read_draft_model()
            seed_drafts()
        if not torch.cuda.is_available() and "attention_backend" not in args:
            # else vLLM's latent attention with AMX, which takes only some sizes
            args = {"attention_config": {"backend": "CPU_MLA"}, **args}
        if not torch.cuda.is_available():
            # whose kernel on a CPU misreads keys that are part of a latent vector
            args = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, **args}
        self.engine = self.api.LLM(**engine_arguments(settings), **args).llm_engine
        self._rpc("aligner_open", settings.memory, settings.lasting)
        if settings.routed_layers and settings.rank % self._width:
            # vLLM expects one scheduler, whose rank alone gets the experts: this one would miss them
            self.engine.engine_core.engine_core.scheduler.aux_output_connector = None

    def _rpc(self, method: str, *arguments: Any) -> Any:
        """Call a method of this process's worker."""
        return self.engine.collective_rpc(method, args=arguments)[0]

    def describe(self) -> dict[str, Any]:
        return {"version": self.api.__version__, "score_rows": self.settings.max_batch}

    # ---- weights

    def begin(self) -> None:
        self.whole, self._checksums = False, {}
        self._rpc("aligner_begin")

    def take(self, slots: list[Slot]) -> dict[str, int]:
        return self._rpc("aligner_take", slots, self.settings.checksums)

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
        """Return a row per (prompt, seed), on the first rank; None if it was aborted."""
        self._require()
        self._temper(1.0)  # with drafts vLLM computes logprobs of tempered logits by the function of prompts
        make, common = self.api.SamplingParams, sampling_arguments(sampling)
        asked = [(prompt, make(**common, seed=seed)) for prompt, seed in self._share(requests)]
        before = self._steps
        with aborted.watching([]):
            outputs = self._run(asked, progress, aborted)
        if outputs is None:
            return None
        if self.settings.routed_layers:
            self._routed = self._experts(outputs)
        if self.settings.draft_tokens:
            self._drafts += sum(map(_drafts_of, outputs)) + torch.tensor([self._steps - before, 0, 0, 0])
        return self._joined(lambda output: self._row(output.outputs[0]), outputs)

    def _experts(self, outputs: list[Any]) -> Tensor | None:
        """Return the experts of all tokens that were fed, [tokens, layers with experts, top_k], on the first rank."""
        layers, first = list(self.settings.routed_layers), self.settings.rank % self._width == 0

        def experts(output: Any) -> Tensor | None:
            chosen = output.outputs[0].routed_experts[:, layers]  # of all layers; uint16 beyond 256 experts
            return torch.from_numpy(chosen.view("int16") if chosen.itemsize > 1 else chosen)

        rows = self._joined(lambda output: experts(output) if first else None, outputs)
        return torch.cat(rows) if self.settings.rank == 0 else None

    def routing(self) -> Tensor | None:
        """Return the experts of the last `generate`, once, on the first rank."""
        routed, self._routed = self._routed, None
        return routed

    def take_drafts(self) -> list[int]:
        """Return the passes since the last call, those that fed a row's draft, drafted tokens, accepted ones."""
        drafts, self._drafts = self._drafts, torch.zeros_like(self._drafts)
        return drafts.tolist()

    def _share[T](self, requests: list[T]) -> list[T]:
        """Return the requests of this rank and those with the same."""
        return requests[self.settings.rank // self._width :: self._shares]

    def _joined[S, T](self, result_of: Callable[[S], T], own: Iterable[S]) -> list[T]:
        """Return the results of all requests, in their order."""
        with ending_all(self._unlike):
            results = list(map(result_of, own))
        if self._shares == 1:
            return results
        shares = gathered_messages(results, dist.group.WORLD)[:: self._width]
        return [shares[i % self._shares][i // self._shares] for i in range(sum(map(len, shares)))]

    def _run(
        self, asked: list[tuple[list[int], Any]], progress: Progress, aborted: Abort | None = None
    ) -> list[Any] | None:
        """Return outputs in the order of `asked`; None if it was aborted."""
        names = [str(self._requests + i) for i in range(len(asked))]
        self._requests += len(asked)
        done: dict[str, Any] = {}
        try:
            with ending_all(self._unlike):
                for name, (prompt, parameters) in zip(names, asked, strict=True):
                    self.engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
            while self._unfinished():
                before = len(done)
                with ending_all(self.line):
                    outputs = self.engine.step()
                self._steps += 1
                done |= {output.request_id: output for output in outputs if output.finished}
                if self._stopped(aborted is not None and aborted.asked, len(done)):
                    return None
                if len(done) > before:
                    progress(len(done))
        finally:
            if left := [name for name in names if name not in done]:
                self.engine.abort_request(left)
        return [done[name] for name in names]

    def _unfinished(self) -> bool:
        with ending_all(self.line):  # with data parallelism the ranks agree in it
            return self.engine.has_unfinished_requests()

    def _stopped(self, asked: bool, done: int) -> bool:
        """Return whether one of the ranks is asked to stop. Raises EngineError where ranks with the same requests
        have not finished the same number of them: they would not meet in the next step."""
        if self.line is None:
            return asked
        with ending_all(self.line):
            states = of_each_rank(torch.tensor([int(asked), done]), dist.group.WORLD)
        counts = [int(state[1]) for state in states]
        for first in range(0, len(counts), self._width):
            if len(set(share := counts[first : first + self._width])) > 1:
                ranks = f"the ranks {first} to {first + self._width - 1} of the engine"
                raise EngineError(f"{ranks} have finished {', '.join(map(str, share))} of the same rows")
        return any(int(state[0]) for state in states)

    def score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Return, per (tokens, first), logprobs of tokens[first:] given those before, of the tempered full
        distribution (twice: those of the cut one came from the sampler)."""
        self._require()
        self._temper(sampling.temperature or 1.0)
        one = self.api.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        own = self._share(rows)
        outputs = self._run([(tokens, one) for tokens, _ in own], lambda done: None)

        def score(of: tuple[Any, tuple[list[int], int]]) -> tuple[list[float], list[float]]:
            output, (tokens, first) = of
            entries = output.prompt_logprobs[first:]
            full = [entry[token].logprob for entry, token in zip(entries, tokens[first:], strict=True)]
            return full, full

        return self._joined(score, zip(outputs, own, strict=True))

    def _temper(self, temperature: float) -> None:
        if temperature != self._temperature:
            self._rpc("aligner_temper", temperature)
            self._temperature = temperature

    def _end(self) -> None:
        self.engine.engine_core.shutdown()


def _drafts_of(output: Any) -> Tensor:
    """Return what `VllmWorker.take_drafts` counts, of one request."""
    steps = output.outputs[0].spec_decode_metrics  # by the number of accepted tokens
    accepted = sum(count * n for count, n in enumerate(steps.histogram))
    return torch.tensor([0, sum(steps.histogram), steps.num_draft_tokens, accepted])
