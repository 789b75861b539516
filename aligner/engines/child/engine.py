"""An engine in a child process, filled from the live trainer: the common code of TensorRT-LLM's and vLLM's engines.

  trainer's rank                                child (serve.py, the worker of each)
  ChildEngine  -- start(config.json) ---------> an engine with dummy weights
     begin_update, buckets, finish_update ----> each answered; the prefix cache is reset
     generate, logprobs ----------------------> requests with a seed each; scores of given tokens

An error between begin_update and finish_update leaves an engine that refuses to generate.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.cluster.handshake import LOOPBACK, session
from aligner.cluster.seal import SECRET_BYTES
from aligner.config.engines import ENGINES
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import RolloutEngine, UpdateLedger
from aligner.engines.child.buckets import BucketWriter, CudaMemory, Memory, MemoryFile, Slot, cuda_buffer
from aligner.engines.child.process import (
    PEER_ENDED,
    ChildChannel,
    ChildEnd,
    clean_environment,
    interpreter,
    spawn,
)
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, Meeting, Row, Settings
from aligner.errors import AlignerError, ConfigError, EngineError, RefitError
from aligner.families.hf_config import hf_config
from aligner.families.table import family_table
from aligner.models.params import expected_hf_shapes, hf_dtypes
from aligner.ops.agree import node
from aligner.ops.packing.routing import no_routing
from aligner.ops.reduce import gathered
from aligner.types import STOP, Generations, Progress, SamplingParams, SeedLists, TokenLists

Decode = Callable[[list[int]], str]
Start = Callable[[torch.device, str], tuple[ChildEnd, Any]]
ANSWERED_BY_FIRST = ("generate", "listen", "score")  # calls whose answer is the first rank's


class ChildEngine(RolloutEngine):
    """A `RolloutEngine` in a child process. `max_seq_len`: prompt + response tokens where the section's `max_seq_len`
    is 0. `bucket_bytes` bounds the transfer buffer, unless the largest tensor needs more. `decode` is needed for stop
    strings only. The ranks of a `group` are one engine: each has a child, which computes its share; all are called
    together with the same arguments.

    Subclasses name the package, give the environment of its process, and say where logprobs come from.
    """

    name: str  # engine.name
    title: str  # of the package, in messages
    worker: str  # module:class of what the child runs
    block: int  # tokens of a block of the KV cache
    called_on_first: tuple[str, ...] = ("listen",)  # calls to the first rank's child alone

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        pad_id: int,
        max_seq_len: int = 0,
        bucket_bytes: int = 256 << 20,
        checksums: bool = True,
        decode: Decode | None = None,
        group: dist.ProcessGroup | None = None,
        start: Start | None = None,
        reports_routing: bool = False,
    ):
        self.require(config)
        assert config.child is not None, config.name
        self.can = ENGINES[self.name].can
        self.cfg, self.config, self.options = model, config, config.child
        self.tensor_parallel = config.tensor_parallel
        self._group, self._rank = group, 0 if group is None else group.rank()
        self.no_routing = no_routing(model) if reports_routing else None
        self.device, self.dtype, self.pad_id, self._decode = torch.device(device), dtype, pad_id, decode
        self.max_seq_len = min(self.options.max_seq_len or max_seq_len or model.max_position, model.max_position)
        self.checked = checksums
        shapes, dtypes = expected_hf_shapes(model), hf_dtypes(family_table(model), dtype)
        self._ledger, self._asleep = UpdateLedger(shapes, group), False
        self._released: list[str] = []  # tags of memory
        size = max(bucket_bytes, *(prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()))
        places = self._of_ranks((node(), self._device_name()))
        self._here = [rank for rank, (machine, _) in enumerate(places) if machine == node()]  # those of this node
        self._devices = [places[rank][1] for rank in self._here]
        self._on_one_node = len(self._here) == len(places)
        buffer, own = self._buffer(size)
        self._source = self._rank if own else self._here[0]  # the rank whose memory this one's child reads
        memory = self._of_ranks(own)[self._source]
        assert memory is not None
        self._writer = BucketWriter(buffer, dtypes)
        self._folder = tempfile.TemporaryDirectory(prefix="aligner-engine-")
        child, connection = (start or self._process)(self.device, self.options.python)
        self._channel = ChildChannel(child, connection, f"{self.title} engine")
        self._finalizer = weakref.finalize(self, _release, self._channel, own, self._folder)
        try:
            description = self._call("start", self._settings(memory), limit="start_timeout_s")
        except BaseException:
            self._finalizer()
            raise
        self.described: dict[str, Any] = description
        self.version, self._score_rows = description["version"], description["score_rows"]

    @classmethod
    def require(cls, config: EngineConfig) -> None:
        """Raise AlignerError where the package cannot be there; only the child knows whether it is."""
        assert config.child is not None, config.name
        interpreter(config.child.python, {}, config.child.KEY)

    def _variables(self) -> dict[str, str]:
        """Return variables to add to the child's environment."""
        return {}

    def _of_ranks[T](self, value: T) -> list[T]:
        """Return the `value` of each rank of this engine. Collective over them."""
        return [value] if self._group is None else gathered(value, self._group)

    def _buffer(self, size: int) -> tuple[Tensor, Memory | None]:
        """Return uint8 [size] and the memory by which the child opens it. On GPUs each rank has its own. On CPUs those
        of a node share the first one's; the others get a meta tensor, which only has a size, and None."""
        if self.device.type == "cuda":
            buffer = cuda_buffer(size, self.device)
            return buffer, CudaMemory.of(buffer)
        if self._rank != self._here[0]:
            return torch.empty(size, dtype=torch.uint8, device="meta"), None
        memory = MemoryFile.create(size)
        return memory.tensor(), memory

    def _device_name(self) -> str:
        """Return the device's name as in CUDA_VISIBLE_DEVICES; "" for a CPU."""
        if self.device.type != "cuda":
            return ""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        seen = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        return seen[index] if seen else str(index)

    def _process(self, device: torch.device, python: str) -> tuple[ChildEnd, Any]:
        """Start a process that sees only the devices of this engine's ranks on this node, in their order."""
        extra, devices = dict(self._variables()), self._devices
        if self._group is not None and self._on_one_node:
            extra["GLOO_SOCKET_IFNAME"] = "lo"
        if device.type == "cuda":
            if len(set(devices)) < len(devices):
                expected = f"ranks that see each other's devices; theirs are {', '.join(devices)}"
                hint = "Let each rank see all devices of its node (Slurm: no --gpus-per-task, --gpu-bind=none)."
                raise ConfigError("engine.tensor_parallel", len(devices), expected, hint)
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        environ = clean_environment(os.environ, extra)
        return spawn(self.worker, environ, python, self.options.KEY)

    def _meeting(self) -> Meeting | None:
        """Let the first rank's child listen. The secret does not cross the network."""
        if self._group is None:
            return None
        host = LOOPBACK if self._on_one_node else socket.gethostname()
        hosts, nonces = zip(*self._of_ranks((host, secrets.token_bytes(SECRET_BYTES))), strict=True)
        ports = self._call("listen", hosts[0], limit="start_timeout_s")
        secret = session().mac(nonces[0], "engine")
        return Meeting(hosts, ports, secret, self.options.start_timeout_s / 2, self.options.KEY)

    def _settings(self, memory: Memory) -> Settings:
        name = str(self.dtype).removeprefix("torch.")
        raw = hf_config(self.cfg, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=name)
        (Path(self._folder.name) / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
        return Settings(
            self._folder.name,
            memory,
            self.cfg.vocab_size,
            name,
            self.max_seq_len,
            self.config.max_batch,
            self.config.cache_bytes,
            self.config.sleeps,
            self.config.sleeps_weights,
            self.options.prefix_reuse,
            self.config.captures and (self.device.type == "cuda" or self.config.cuda_graphs is True),
            self.pad_id,
            self.checked and self._source == self._rank,
            tensor_parallel=1 if self._group is None else self._group.size(),
            rank=self._rank,
            device=self._here.index(self._rank),
            meeting=self._meeting(),
            args=self.options.args,
            routed_layers=() if self.no_routing is None else tuple(self.cfg.layers_of("sparse")),
            draft_tokens=self.config.draft_tokens,
            drafts_ahead=bool(self.cfg.mtp.layers),
        )

    def _call(
        self, name: str, *arguments: Any, limit: str = "call_timeout_s", error: type = EngineError, progress=None
    ) -> Any:
        """Call the children, or the first rank's; return this rank's answer, or the first's. Raises the error of one on
        every rank of the group."""
        timeout_s, key = getattr(self.options, limit), f"{self.options.KEY}.{limit}"
        answer: list[Any] = [None]
        cause: BaseException | None = None
        try:
            if self._rank == 0 or name not in self.called_on_first:
                answer[0] = self._channel.call(
                    name, *arguments, timeout_s=timeout_s, key=key, error=error, progress=progress
                )
        except BaseException as caught:
            cause = caught
        self._raise_together(name, cause, error)
        if self._group is not None and name in ANSWERED_BY_FIRST:
            dist.broadcast_object_list(answer, src=dist.get_global_rank(self._group, 0), group=self._group)
        return answer[0]

    def _raise_together(self, name: str, cause: BaseException | None, error: type) -> None:
        """Raise one error on all ranks. Prefer that of a child that ended by itself, then any other, last that of a
        child that ended because of a peer."""
        own = cause if cause is None or isinstance(cause, AlignerError) else error(str(cause))
        if own is None and self._rank_of_error == 0:
            own = error(self._channel.gone(name))
        failures = self._of_ranks((own, self._rank_of_error))
        if not any(failure for failure, _ in failures):
            return
        if any(order == 2 for _, order in failures):  # perhaps nobody called the one that ended first
            own = own or error(self._channel.gone(name))
            failures = self._of_ranks((own, self._rank_of_error))
        if cause is not None and cause is not own:
            raise cause
        raise min((order, i, failure) for i, (failure, order) in enumerate(failures) if failure)[2]

    @property
    def _rank_of_error(self) -> int:
        """0 if this rank's child has ended, 2 if it has because another rank's had, else 1."""
        how = self._channel.child.ended()
        return 1 if not how else 2 if how.endswith(f" {PEER_ENDED}") else 0

    @property
    def weight_version(self) -> int:
        return self._ledger.version

    # ---- weights

    def begin_update(self, version: int) -> None:
        self._ledger.begin(version)
        self._return([tag for tag in self._released if tag == WEIGHTS], RefitError)  # the KV cache can wait
        self._call("begin", error=RefitError)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        accepted = ((n, t) for n, t in tensors if self._ledger.accept(n, t.shape))
        for slots in self._writer.buckets(accepted):
            self._take(slots)

    def _take(self, slots: list[Slot]) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)  # each rank has written its buffer
        taken = self._call("bucket", slots, error=RefitError)
        if taken != len(slots):
            raise RefitError(f"the engine took {taken} tensors of a bucket of {len(slots)}")

    def finish_update(self) -> None:
        self._ledger.finish(self._finish)

    def _finish(self) -> None:
        self._call("finish", error=RefitError)

    def checksums(self) -> Mapping[str, int]:
        """Return the checksums of the tensors as they arrived in the child; only the sentinel can check the engine's
        own."""
        if not self.checked:
            raise ConfigError("refit.verify", "sentinel", "checksum, so that the engine hashes the tensors it receives")
        return self._of_ranks(self._call("checksums", error=RefitError))[self._source]

    # ---- memory

    def sleep(self, weights: bool = False) -> None:
        """See `RolloutEngine.sleep`. The weights are released with the cache or not at all."""
        if self.config.sleeps and not self._asleep:
            self._release([KV_CACHE, WEIGHTS] if weights and self.config.sleeps_weights else [KV_CACHE])
        self._asleep = True

    def wake(self) -> None:
        self._return(self._released)
        self._asleep = False

    def _release(self, tags: list[str]) -> None:
        self._released = tags
        if WEIGHTS in tags:
            self._ledger.lose()
        self._call("sleep", tags)

    def _return(self, tags: list[str], error: type = EngineError) -> None:
        if tags:
            self._call("wake", tags, error=error)
            self._released = [tag for tag in self._released if tag not in tags]

    def close(self) -> None:
        self._ledger.lose()
        self._finalizer()

    # ---- generation

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """See `RolloutEngine.generate`. With stop strings responses are generated to their limit and then cut.

        Raises EngineError when the child ends, hangs or fails; ConfigError as the native engine does, and for
        sampling that the package does not support. An exception of `progress` cancels all requests and is raised
        again.
        """
        return self._generated(prompts, seeds, sampling, progress)

    def _generated(
        self,
        prompts: TokenLists,
        seeds: SeedLists,
        sampling: SamplingParams,
        progress: Progress | None = None,
        asked: Any = None,
        begun: None = None,
    ) -> Generations:
        """Generate on this engine alone. `begun` is unused: only the native engine has windows of decode steps."""
        self._ledger.require()
        assert not self._asleep, "generate() on a sleeping engine: wake() it first"
        assert len(prompts) == len(seeds), f"{len(prompts)} prompts, but seeds for {len(seeds)}"
        if sampling.stop and self._decode is None:
            raise ConfigError("sampling.stop", sampling.stop, "no stop strings: this engine has no decoder")
        pairs = [(p, s) for p, own in zip(prompts, seeds, strict=True) for s in own]
        requests = [(list(map(int, p)), int(s) & (1 << 63) - 1) for p, s in pairs]
        if not requests:
            return replace(self._result([], sampling), routing=self.no_routing)
        self._check_room(max(len(p) for p, _ in requests), sampling)
        report = None if progress is None or self._rank else lambda done: progress(done, len(requests))
        rows = self._call("generate", requests, sampling, limit="generate_timeout_s", progress=report)
        if rows is None:
            raise EngineError("the requests were aborted")
        prompts_ = [prompt for prompt, _ in requests]
        routing = None if self.no_routing is None else self._routing(prompts_, rows)
        rows = [self._cut(row, sampling) for row in rows]
        return replace(self._result(self._scored(prompts_, rows, sampling), sampling), routing=routing)

    def _routing(self, prompts: list[list[int]], rows: list[Row]) -> Tensor:
        """Return the routing of the rows just generated, as `Generations` has it. The first rank's child has it, one
        tensor for all tokens that were fed."""
        assert self.no_routing is not None
        fed = [len(prompt) + len(row[0]) - 1 for prompt, row in zip(prompts, rows, strict=True)]
        whole = self.no_routing.new_empty(sum(fed), *self.no_routing.shape[2:])
        if (answer := self._call("routing")) is not None:
            if answer.shape != whole.shape:
                raise EngineError(f"{self.title} named experts {list(answer.shape)}: expected {list(whole.shape)}")
            whole = answer.to(whole.dtype)
        if self._group is not None:
            first = dist.get_global_rank(self._group, 0)
            dist.broadcast(whole.view(torch.uint8), src=first, group=self._group)
        routing = whole.new_zeros(len(fed), max(fed) + 1, *whole.shape[1:])
        for row, own in zip(routing, whole.split(fed), strict=True):
            row[: len(own)] = own
        return routing

    def _scored(self, prompts: list[list[int]], rows: list[Row], sampling: SamplingParams) -> list[Row]:
        """Return the rows with all logprobs: by a second forward where the sampler gave none that can be used."""
        lacking = [i for i, row in enumerate(rows) if row[3] is None and (row[1] is None or sampling.truncates)]
        scores = self._scores([([*prompts[i], *rows[i][0]], len(prompts[i])) for i in lacking], sampling)
        scored = dict(zip(lacking, scores, strict=True))
        out = []
        for i, (tokens, cut, reason, full) in enumerate(rows):
            again, again_cut = scored.get(i, (cut if full is None else full, cut))
            out.append((tokens, again_cut if cut is None else cut, reason, again))
        return out

    def _check_room(self, longest: int, sampling: SamplingParams) -> None:
        row = longest + sampling.max_response_tokens
        limits = {"model.max_position": self.cfg.max_position, f"{self.options.KEY}.max_seq_len": self.max_seq_len}
        for key, limit in limits.items():
            if row > limit:
                raise ConfigError(key, limit, f"at least {row} (prompt + response tokens)")
        needed = self._cache_bytes(row)
        if needed > self.config.cache_bytes:
            expected = f"at least {needed} bytes for one row of {row} tokens"
            raise ConfigError("engine.kv_cache_bytes", self.config.cache_bytes, expected)

    def _cache_bytes(self, row: int) -> int:
        """Return the smallest cache that holds a row of so many tokens."""
        return -(-row // self.block) * self.block * self.position_bytes

    @property
    def position_bytes(self) -> int:
        """The bytes of a token in the KV cache of one rank."""
        heads = max(1, self.cfg.num_kv_heads // (1 if self._group is None else self._group.size()))
        return 2 * self.cfg.num_layers * heads * self.cfg.kv_channels * self.dtype.itemsize

    def _cut(self, row: Row, sampling: SamplingParams) -> Row:
        """Return the row up to the token that completes its first stop string."""

        def stopped(count: int) -> bool:
            text = self._decode(tokens[:count])
            return any(s in text for s in sampling.stop)

        tokens, logprobs, _, full = row
        if not sampling.stop or not stopped(len(tokens)):
            return row
        low, high = 1, len(tokens)  # more tokens never take a string away
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if stopped(middle) else (middle + 1, high)
        return tokens[:low], None if logprobs is None else logprobs[:low], STOP, None if full is None else full[:low]

    def _result(self, rows: list[Row], sampling: SamplingParams) -> Generations:
        shape = len(rows), max((len(row[0]) for row in rows), default=0)
        tokens, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        full = torch.zeros(shape) if sampling.truncates else None
        for i, row in enumerate(rows):
            n = len(row[0])
            tokens[i, :n], logprobs[i, :n] = torch.tensor(row[0], dtype=torch.int64), torch.tensor(row[1])
            if full is not None:
                full[i, :n] = torch.tensor(row[3])
        lengths = torch.tensor([len(row[0]) for row in rows], dtype=torch.int64)
        reasons = torch.tensor([row[2] for row in rows], dtype=torch.int64)
        return Generations(tokens, lengths, logprobs, reasons, self.weight_version, full)

    # ---- scoring

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """See `RolloutEngine.logprobs`. Slow: meant for the few rows of the sentinel."""
        self._ledger.require()
        out = torch.zeros(tokens.shape, dtype=torch.float32)
        sampling = replace(SamplingParams(1), temperature=temperature)
        wanted = [i for i, n in enumerate(lengths.tolist()) if n > 1]
        rows = [(tokens[i, : int(lengths[i])].tolist(), 1) for i in wanted]
        for i, (full, _) in zip(wanted, self._scores(rows, sampling), strict=True):
            out[i, 1 : len(full) + 1] = torch.tensor(full)
        return out

    def decoded(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return (int64, float32) [B, count]: the likeliest tokens after each row, decoded one by one, and their
        logprobs from the sampler. Runs on this engine alone, as `logprobs` does, which runs no decode step."""
        prompts = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        generations = self._generated(prompts, [[0]] * len(prompts), SamplingParams(count, temperature=0.0))
        return generations.tokens, generations.logprobs

    def _scores(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Score the rows, in calls of as many as the worker takes together: each call has its time limit."""
        n, scores = self._score_rows, []
        for i in range(0, len(rows), n):
            scores += self._call("score", rows[i : i + n], sampling)
        return scores


def _release(channel: ChildChannel, memory: Memory | None, folder: tempfile.TemporaryDirectory) -> None:
    channel.close()
    if isinstance(memory, MemoryFile):
        memory.close()
    folder.cleanup()
