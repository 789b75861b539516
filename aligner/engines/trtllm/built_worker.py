"""One TensorRT engine of TensorRT-LLM (up to 1.2) in its process: built at the start, refitted, run by `ModelRunner`.

It is built from config.json and random weights: no regularity of a trainer's values (norms of ones, a tied head) can
be folded into the plan. A refit gives TensorRT every parameter by name, from host memory, and takes effect at once,
or not at all. Until then the engine keeps its old weights, and `whole` keeps callers from using it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from aligner.engines.base import listed
from aligner.engines.child.serve import Abort
from aligner.engines.child.worker import KV_CACHE, LocalWorker, Progress, Row, Settings
from aligner.engines.trtllm.build import build_runner
from aligner.engines.trtllm.built_api import version_row
from aligner.engines.trtllm.layout import EngineParameter, Part, layout
from aligner.engines.trtllm.sampling import runner_arguments
from aligner.engines.trtllm.steps import LogprobWatch, PrescribedTokens
from aligner.errors import EngineError, RefitError
from aligner.families.hf_config import config_from_hf
from aligner.types import LENGTH, STOP, SamplingParams


class EngineWorker(LocalWorker):
    """A worker with one method per call, as `torch_worker.Worker`."""

    def __init__(self, settings: Settings):
        import tensorrt_llm

        self.version = tensorrt_llm.__version__
        version_row(self.version)
        import tensorrt

        self.trt, self.cfg = tensorrt, config_from_hf(settings.folder)
        self.layout = layout(self.cfg)
        self.runner, self.constants = build_runner(settings, self.layout)
        self.engine = self.runner.session.runtime.engine
        self.refitter: Any = None
        self.awake = True
        super().__init__(settings)
        dtype, pinned = getattr(torch, settings.dtype), self.buffer.is_cuda
        self.staged = {t.name: torch.empty(t.shape, dtype=dtype, pin_memory=pinned) for t in self.layout.values()}
        self.sources: dict[str, list[tuple[EngineParameter, Part]]] = {}
        for target in self.layout.values():
            for rows in target.parts:
                self.sources.setdefault(rows.source, []).append((target, rows))

    def describe(self) -> dict[str, Any]:
        return {"version": self.version, "partial": True, "score_rows": self.settings.max_batch}

    # ---- weights

    def begin(self) -> None:
        from tensorrt_llm.logger import logger

        self.whole, self._checksums = False, {}
        self.refitter = self.trt.Refitter(self.engine, logger.trt_logger)
        self._compare(set(self.refitter.get_all_weights()) - self.constants, "it lists")
        self._open = {name: len(target.parts) for name, target in self.layout.items()}

    def _compare(self, present: set[str], what: str) -> None:
        """Check that all parameters are there: the engine would silently keep the old values of a missing one."""
        missing, extra = sorted(set(self.layout) - present), sorted(present - set(self.layout))
        if missing or extra:
            self.refitter = None
            differences = [f"{word} {listed(names)}" for word, names in (("lacks", missing), ("also", extra)) if names]
            raise RefitError(
                f"the engine's parameters are not those of model.family={self.cfg.family}: {what} {len(present)}, "
                f"{len(self.layout)} are delivered; {'; '.join(differences)}"
            )

    def load(self, tensors: dict[str, Tensor]) -> None:
        if self.refitter is None:
            raise RefitError("a bucket came outside of an update")
        for source, tensor in tensors.items():
            for target, rows in self.sources[source]:
                self.staged[target.name][rows.start : rows.stop].copy_(tensor)
                self._open[target.name] -= 1
                if not self._open[target.name]:
                    self._set(target)

    def _set(self, target: EngineParameter) -> None:
        """Hand a parameter to TensorRT, which reads it when the refit is carried out."""
        staged, trt = self.staged[target.name], self.trt
        dtype = {torch.float32: trt.DataType.FLOAT, torch.bfloat16: trt.DataType.BF16}[staged.dtype]
        weights = trt.Weights(dtype, staged.data_ptr(), staged.numel())
        if not self.refitter.set_named_weights(target.name, weights, trt.TensorLocation.HOST):
            self.refitter = None
            shape = "x".join(map(str, target.shape))
            raise RefitError(f"TensorRT refused {target.name}, {shape} in {self.settings.dtype}")

    def finish(self) -> None:
        if self.refitter is None:
            raise RefitError("finish came outside of an update")
        self._compare({name for name, parts in self._open.items() if parts == 0}, "delivered were")
        refitter, self.refitter = self.refitter, None
        missing = refitter.get_missing_weights()
        if missing:
            raise RefitError(f"TensorRT has combined parameters and lacks {listed(sorted(missing))}")
        self._synchronize()
        if not refitter.refit_cuda_engine():
            raise RefitError("refit_cuda_engine failed: the engine's weights are unknown")
        self._synchronize()
        self.whole = True

    # ---- memory

    def sleep(self, tags: list[str]) -> None:
        """Release the KV cache. Each call of the runtime allocates it anew; its session holds the last one between
        calls."""
        assert tags == [KV_CACHE], tags
        session = self.runner.session
        session.buffer, session.buffer_allocated, self.awake = None, False, False
        self._synchronize()
        self._give_back()

    def wake(self, tags: list[str]) -> None:
        self.awake = True

    # ---- generation

    def generate(
        self, requests: list[tuple[list[int], int]], sampling: SamplingParams, progress: Progress, aborted: Abort
    ) -> list[Row] | None:
        """Return a row per (prompt, seed); None if it was aborted. Rows of a chunk are decoded together, to the
        last's end."""
        self._ready()
        done: list[Row] = []
        with aborted.watching([]):
            for chunk in self._chunks([len(prompt) for prompt, _ in requests], sampling.max_response_tokens):
                prompts, seeds = zip(*(requests[i] for i in chunk), strict=True)
                done += self._decode(list(prompts), seeds, sampling, aborted)
                if aborted.asked:
                    return None
                progress(len(done))
        return done

    def _chunks(self, lengths: list[int], new: int) -> Iterator[range]:
        """Yield neighbouring rows whose prompt tokens, keys and values (for the longest row of them) fit."""
        cfg = self.cfg
        position = (
            2 * cfg.num_layers * cfg.num_kv_heads * cfg.kv_channels * getattr(torch, self.settings.dtype).itemsize
        )
        start = longest = tokens = 0
        for i, n in enumerate(lengths):
            longest, tokens, rows = max(longest, n), tokens + n, i + 1 - start
            room = rows * (longest + new) * position <= self.settings.kv_cache_bytes
            if i > start and not (room and rows <= self.settings.max_batch and tokens <= self.settings.max_num_tokens):
                yield range(start, i)
                start, longest, tokens = i, n, n
        if lengths:
            yield range(start, len(lengths))

    def _decode(
        self, prompts: list[list[int]], seeds: Iterable[int], sampling: SamplingParams, aborted: Abort
    ) -> list[Row]:
        lengths = [len(prompt) for prompt in prompts]
        watch = LogprobWatch(lengths, sampling, self.settings.vocab_size)
        arguments = runner_arguments(sampling, list(seeds))
        stop = lambda step, ids, scores: aborted.asked  # noqa: E731
        ids, ends = self._run(prompts, arguments, logits_processor=watch, stopping_criteria=stop)
        if aborted.asked:
            return []
        cut, full = watch.logprobs(ids)
        rows: list[Row] = []
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            tokens = ids[i, length:end].tolist()
            if not 0 < len(tokens) <= sampling.max_response_tokens:
                raise EngineError(f"{len(tokens)} tokens were generated: expected 1 to {sampling.max_response_tokens}")
            self._in_vocabulary(tokens)
            n, stopped = len(tokens), tokens[-1] in sampling.stop_token_ids
            if not stopped and n < sampling.max_response_tokens:
                raise EngineError(f"a row ended with token {tokens[-1]} after {n} tokens: expected a stop token")
            rows.append((tokens, cut[i, :n].tolist(), STOP if stopped else LENGTH, full[i, :n].tolist()))
        return rows

    def _run(self, prompts: list[list[int]], arguments: dict[str, Any], **hooks: Any) -> tuple[Tensor, list[int]]:
        """Return int64 [n, T], prompts and generated tokens, on the CPU; and the end of each row."""
        from tensorrt_llm.runtime import SamplingConfig

        out = self.runner.generate(
            batch_input_ids=[torch.tensor(prompt, dtype=torch.int32) for prompt in prompts],
            sampling_config=SamplingConfig(**arguments),
            **hooks,
        )
        return out["output_ids"][:, 0].long().cpu(), out["sequence_lengths"][:, 0].tolist()

    def score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        """Return, per (tokens, first), logprobs of tokens[first:] given those before, of the tempered full
        distribution and of the one that `sampling` samples from. The tokens are generated again, prescribed, as they
        were the first time."""
        self._ready()
        new = max((len(tokens) - first for tokens, first in rows), default=0)
        scores: list[tuple[list[float], list[float]]] = []
        for chunk in self._chunks([first for _, first in rows], new):
            scores += self._score([rows[i] for i in chunk], sampling)
        return scores

    def _score(
        self, rows: list[tuple[list[int], int]], sampling: SamplingParams
    ) -> list[tuple[list[float], list[float]]]:
        firsts, counts = [first for _, first in rows], [len(tokens) - first for tokens, first in rows]
        wanted = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, (tokens, first) in enumerate(rows):
            wanted[i, : counts[i]] = torch.tensor(tokens[first:])
        steps = PrescribedTokens(firsts, wanted, sampling, self.settings.vocab_size)
        greedy = runner_arguments(SamplingParams(max(counts), temperature=0), [0] * len(rows))
        ids, _ = self._run([tokens[:first] for tokens, first in rows], greedy, logits_processor=steps)
        for i, (first, n) in enumerate(zip(firsts, counts, strict=True)):
            if not torch.equal(ids[i, first : first + n], wanted[i, :n]):
                raise EngineError("the engine did not generate the tokens that were prescribed to it")
        cut, full = steps.logprobs(ids)
        return [(full[i, :n].tolist(), cut[i, :n].tolist()) for i, n in enumerate(counts)]

    def _ready(self) -> None:
        self._require()
        if not self.awake:
            raise EngineError("the engine sleeps: its KV cache has been released")

    def close(self) -> None:
        del self.runner, self.engine, self.refitter
