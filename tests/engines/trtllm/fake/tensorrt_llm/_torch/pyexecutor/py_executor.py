"""Requests, prefixes and control actions. Of several ranks each computes its share, when the first one runs."""

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native.engine import NativeEngine
from aligner.families.hf_config import config_from_hf
from aligner.models.params import expected_hf_shapes
from aligner.models.shards import hf_tensors
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import SamplingParams
from tensorrt_llm._torch.distributed.communicator import ACTION_S, TorchDist
from tensorrt_llm._torch.moe.fused_moe.moe_load_balancer import MoeLoadBalancer
from tensorrt_llm._torch.pyexecutor.model import Model
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from tensorrt_llm._torch.pyexecutor.sampler import SpecSampler, TorchSampler
from tensorrt_llm._torch.speculative.ngram import NGramDrafter
from tensorrt_llm._utils import mpi_disabled, mpi_rank
from tensorrt_llm.calls import note
from tensorrt_llm.llmapi.llm_args import OLD

LATEST: list = []
NEWEST = os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1").startswith("1.4")


class PyExecutor:
    def __init__(self, args):
        self.args, self.queue, self.in_control = args, [], False
        self.free = threading.Event()  # of control actions
        self.free.set()
        self.kv_there, self.kv_dirty = True, False
        self.away: set[str] = set()  # tags of released memory
        self.prefixes: dict[tuple, int] = {}  # prompt -> the weights its keys and values are of
        self.cfg = config_from_hf(args.model)
        partial = not os.environ.get("FAKE_TRTLLM_WHOLE")
        ranks = args.tensor_parallel_size
        self.dist = TorchDist(ranks) if mpi_disabled() else None
        self.shares = {t.name: (t.axis, *t.interval(ranks, mpi_rank())) for t in hf_tensors(self.cfg)}
        self.model_engine = SimpleNamespace(model=Model(expected_hf_shapes(self.cfg), self.shares, partial))
        self.model_engine.model_loader = ModelLoader(self)
        if os.environ.get("FAKE_TRTLLM_BALANCER"):
            self.model_engine.moe_load_balancer = MoeLoadBalancer(self)
        self.drafter = args.speculative_config and NGramDrafter(args.speculative_config)
        within = self.drafter and os.environ.get("FAKE_TRTLLM_DRAFTS") == "within"
        self.sampler = SpecSampler() if within else TorchSampler()
        self.slot_was_used = False  # by an earlier request
        self._engines: dict[int, NativeEngine] = {}
        LATEST.append(self)
        self.loop = threading.Thread(target=self._follow, daemon=True)
        if mpi_rank() > 0:
            self.loop.start()

    def _follow(self) -> None:
        """The loop of a rank that is not the first."""
        try:
            while (batch := self.dist.broadcast()) is not None:
                if not self.free.wait(ACTION_S):
                    raise RuntimeError("requests wait for a control action that this rank does not leave")
                self._run([SimpleNamespace(prompt_token_ids=prompt, params=params) for prompt, params in batch])
        except Exception:
            traceback.print_exc()
            os.abort()

    def shutdown(self) -> None:
        if self.dist is not None and self.dist.rank == 0:
            self.dist.broadcast(None)
        elif self.dist is not None:
            self.loop.join()

    @contextlib.contextmanager
    def control_action(self) -> Iterator[None]:
        if self.in_control:
            raise RuntimeError("nested control_action")
        if self.queue:
            raise RuntimeError("a control action while requests are active")
        self.in_control = True
        self.free.clear()
        try:
            if self.dist is not None:
                self.dist.enter()
            yield
        finally:
            self.in_control = False
            self.free.set()

    def require_control(self, name: str) -> None:
        if not self.in_control:
            raise RuntimeError(f"{name} while the executor may be running")

    def reset_prefix_cache(self) -> None:
        note("reset_prefix_cache")
        self.require_control("reset_prefix_cache")
        self.prefixes, self.kv_dirty = {}, False

    def run(self) -> None:
        """All waiting requests of one kind."""
        for request in [r for r in self.queue if r.cancelled]:
            self._cancel(request)
        if not self.queue:
            return
        key = self._kind(self.queue[0])
        batch = [r for r in self.queue if self._kind(r) == key][: self.args.max_batch_size]
        self.queue = [r for r in self.queue if r not in batch]
        if self.dist is not None:
            self.dist.broadcast([(r.prompt_token_ids, r.params) for r in batch])
        self._run(batch)

    def _run(self, batch: list) -> None:
        note("run", str(len(batch)))
        if self.away - {"kv_cache", "model_weights"}:
            raise RuntimeError(
                f"CUDA error: an illegal memory access was encountered: {sorted(self.away)} was released"
            )
        if not self.kv_there:
            raise RuntimeError("CUDA error: the KV cache has been released")
        version = self._weights()
        groups: dict[int, list] = {}
        for request in batch:
            held = version
            if self.args.kv_cache_config.enable_block_reuse:
                held = self.prefixes.setdefault(tuple(request.prompt_token_ids), version)
            groups.setdefault(held, []).append(request)
        if self.dist is not None:
            numbers = list(self._engines)
            self.dist.agree(tuple(numbers.index(held) for held in groups), "the weights of their prefixes")
        for held, requests in groups.items():
            self._serve(self._engines[held], requests)

    def _kind(self, request) -> str:
        p = request.params
        return repr((p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.stop_token_ids, p.return_context_logits))

    def _cancel(self, request) -> None:
        request.finished = True
        request.outputs = [SimpleNamespace(token_ids=[], logprobs=[], finish_reason="cancelled")]
        self.queue.remove(request)

    def _weights(self) -> int:
        tensors = self.model_engine.model.tensors()
        version = hash(tuple(tensor_checksum(t) for t in tensors.values()))
        if version not in self._engines:
            kv = self.args.kv_cache_config.max_gpu_total_bytes
            config = EngineConfig(kv_cache_bytes=2 * kv, max_batch=self.args.max_batch_size)
            dtype = getattr(torch, self.args.dtype)
            group = None if self.dist is None else self.dist.group
            engine = NativeEngine(self.cfg, config, device="cpu", dtype=dtype, pad_id=0, group=group)
            engine.begin_update(0)
            for name, tensor in tensors.items():
                view = engine.weight_view(name, *self.shares[name][1:])
                view.copy_(tensor.reshape(view.shape))
            engine.finish_update()
            self._engines[version] = engine
        return version

    def _serve(self, engine: NativeEngine, requests: list) -> None:
        p = requests[0].params
        greedy = p.temperature == 0 or p.top_k == 1
        stops = (p.end_id,) if p.end_id >= 0 else ()
        if os.environ.get("FAKE_TRTLLM_ENDS") != "end_id":
            stops += tuple(p.stop_token_ids or ())
        sampling = SamplingParams(
            p.max_tokens, 0.0 if greedy else p.temperature or 1.0, p.top_p or 1.0, p.top_k or 0, p.min_p or 0.0, stops
        )
        if greedy:
            sampling = SamplingParams(p.max_tokens, 0.0, stop_token_ids=stops)
        prompts = [r.prompt_token_ids for r in requests]
        seeds = [[r.params.seed or 0] for r in requests]
        out = engine.generate(prompts, seeds, sampling)
        if os.environ.get("FAKE_TRTLLM_STALE_GRAPHS") and p.max_tokens > 1:
            old = next(iter(self._engines.values()))
            after = [[*prompt, int(tokens[0])] for prompt, tokens in zip(prompts, out.tokens, strict=True)]
            rest = old.generate(after, seeds, replace(sampling, max_response_tokens=p.max_tokens - 1))
            tokens, logprobs = (
                torch.cat([a[:, :1], b], 1) for a, b in ((out.tokens, rest.tokens), (out.logprobs, rest.logprobs))
            )
            out = replace(
                out, tokens=tokens, logprobs=logprobs, lengths=rest.lengths + 1, finish_reason=rest.finish_reason
            )
        for i, request in enumerate(requests):
            self._finish(engine, request, out, i)

    def _finish(self, engine: NativeEngine, request, out, i: int) -> None:
        p, n = request.params, int(out.lengths[i])
        tokens = out.tokens[i, :n].tolist()
        if self.drafter and not NEWEST and p.stop_token_ids and self.slot_was_used:
            out.finish_reason[i], tokens, n = 0, tokens[:1], 1  # a stop token of that one is taken for this one's first
        self.slot_was_used = True
        row = torch.tensor([[*request.prompt_token_ids, *tokens]])
        start = row.shape[1] - n
        if getattr(p, "logprobs_mode", "raw") == "processed" or os.environ.get("FAKE_TRTLLM_STALE_GRAPHS"):
            values = out.logprobs[i, :n].tolist()
        else:
            values = engine.logprobs(row, torch.tensor([row.shape[1]]))[0, start:].tolist()
        request.decoding_iter = n
        if self.drafter:
            drafted, request.decoding_iter = self.drafter.accepted(id(request), request.prompt_token_ids, tokens)
            for at in drafted if os.environ.get("FAKE_TRTLLM_DRAFTS") == "drawn" else ():
                values[at] -= 1.0  # of the token that was drawn there, not of the accepted one
        stopped = out.finish_reason[i] == 0
        left_out = os.environ.get("FAKE_TRTLLM_ENDS") == "left out" and tokens[-1] == p.end_id
        if stopped and (left_out or not p.include_stop_str_in_output):
            tokens, values = tokens[:-1], values[:-1]
        logprobs = None
        if p.logprobs is not None:
            logprobs = [{t: SimpleNamespace(logprob=v, rank=1)} for t, v in zip(tokens, values, strict=True)]
            if p.logprobs == 0 and getattr(p, "logprobs_simple_format", False):
                logprobs = values
            elif OLD:  # the likeliest token's alone
                logprobs = [e if v > -0.5 else {} for e, v in zip(logprobs, values, strict=True)]
        reason = "stop" if stopped else "length"
        request.outputs = [SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)]
        if p.return_context_logits:
            with torch.inference_mode():
                prompt = torch.tensor([request.prompt_token_ids])
                request.context_logits = engine.model.logits(engine.model.prefill(prompt)[0])
        request.finished = True
