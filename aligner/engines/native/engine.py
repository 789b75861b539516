"""The native engine: continuous batching over a slot cache, one readable step.

step:  decode  logits for every running row: slots [0, n)
       admit   waiting prompts are prefilled, each once, and their keys and values copied to their rows' slots
       sample  one token for every row, new and old
       settle  write the tokens down, let finished rows leave, move the last rows into the gaps

Slots that no running row needs hold ended rows that may continue (`prefixes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.cluster.memory_pages import keep_freed_memory
from aligner.config.engines import ENGINES
from aligner.config.on_demand import on_demand
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import Finished, RolloutEngine, UpdateLedger, draft_sums, require_finite
from aligner.engines.native.ahead import AheadDrafts
from aligner.engines.native.batch import Batch
from aligner.engines.native.cache import SlotCache
from aligner.engines.native.drafts import DraftSource, PromptLookup
from aligner.engines.native.graphs import REACH, CudaRecorder, DecodeGraphs
from aligner.engines.native.model import NativeModel
from aligner.engines.native.peers import EngineRanks
from aligner.engines.native.routes import Routes
from aligner.engines.native.schedule import CacheUse, GenerationPlan, PromptPool, PromptRequest, plan_generation
from aligner.errors import ConfigError, RefitError
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.ops.packing.routing import no_routing
from aligner.types import Generations, Progress, SamplingParams, SeedLists, Sums, TokenLists

Decode = Callable[[list[int]], str]
_SCORED_TOKENS = 8192  # per forward of `logprobs`
_SCORED_LOGITS = 1 << 25  # logits held at once by `logprobs`


@dataclass
class EngineStats:
    """Counts of the last `generate`."""

    steps: int = 0
    prefilled_prompts: int = 0
    prompt_tokens: int = 0  # of these
    held_tokens: int = 0  # of the prompt tokens, copied from rows that were kept: the others were computed
    decoded_rows: int = 0  # rows summed over decode steps: response tokens less one per sample, if none is wasted
    paused_rows: int = 0  # for lack of pages: read again later
    cache_usage: float = 0.0  # greatest share of the cache's pages that rows had
    drafted_rows: int = 0  # rows with a draft summed over decode steps
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these: sampled as well

    def with_later(self, later: EngineStats) -> EngineStats:
        """Return the counts of both."""
        names = [field.name for field in fields(self)]
        both = {name: getattr(self, name) + getattr(later, name) for name in names}
        return EngineStats(**both | {"cache_usage": max(self.cache_usage, later.cache_usage)})


class NativeEngine(RolloutEngine):
    """A `RolloutEngine` in plain PyTorch. `decode` (token ids -> text) is needed for stop strings only.

    With a `group` its ranks are one engine: each holds a share of every layer, and all of them are called together
    with the same arguments and return the same. `reports_routing`: generations of a model with experts name the
    experts that computed each token.
    """

    can = ENGINES["native"].can

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        pad_id: int,
        decode: Decode | None = None,
        group: dist.ProcessGroup | None = None,
        reports_routing: bool = False,
    ):
        self.config, self.device, self.pad_id, self._decode = config, torch.device(device), pad_id, decode
        self.dtype = dtype
        if self.device.type == "cpu":
            keep_freed_memory()
        self.peers = EngineRanks(group)
        self.model = NativeModel(model, self.device, dtype, self.peers)
        memories = self.model.memories(1 + config.draft_tokens)
        if model.traits.entries and config.draft_tokens:
            expected = f"0 with family {model.family}: its states cannot go back to the last token that was kept"
            raise ConfigError("engine.draft_tokens", config.draft_tokens, expected)
        (*sizes, planes), *others = self.model.cached
        beside = [SlotCache(*each[:3], self.device, dtype) for each in others]
        self.drafter = None
        if config.draft_tokens and config.draft_model:
            self.drafter = on_demand("engine.draft_model")(config.draft_model, self.model)
            beside += self.drafter.cache.kinds
        self.routes = None
        if reports_routing:
            self.no_routing = no_routing(model)
            layers = len(model.layers_of("sparse"))
            self.routes = Routes(layers, model.moe.top_k, model.moe.num_experts, self.device)
            beside.append(self.routes.cache)
        self.cache = SlotCache(*sizes, self.device, dtype, planes, memories, beside)
        on_gpu = self.device.type == "cuda"
        if config.cuda_graphs is True and not on_gpu:
            raise ConfigError("engine.cuda_graphs", True, f"false on device {self.device.type}")
        captures = on_gpu and config.captures_of(model.moe.num_experts)
        self.graphs = DecodeGraphs(self.model, CudaRecorder(), config.max_batch) if captures else None
        if self.drafter is not None and on_gpu and config.captures_of(self.drafter.model.cfg.moe.num_experts):
            self.drafter.graphs = DecodeGraphs(self.drafter.model, CudaRecorder(), config.max_batch)
        self.keeps_rows = memories is None  # earlier ones are not kept
        self.stats = EngineStats()
        self._totals = EngineStats()  # since `take_sums`
        self._ledger = UpdateLedger(self.model.shapes)
        self._asleep = False
        self._staged_logits = torch.empty(0, device=self.device)  # float32 [staged prompts, V] of their first token
        self._staged_hidden = self._staged_logits  # [staged prompts, H], which these are of

    @property
    def weight_version(self) -> int:
        return self._ledger.version

    # ---- weights

    def begin_update(self, version: int) -> None:
        self._ledger.begin(version)
        self.model.restore()

    @property
    def tensor_parallel(self) -> int:
        return self.peers.size

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if self._ledger.accept(name, tensor.shape):
                self.model.load(name, tensor)
        if self.device.type == "cuda":  # copies are queued: the caller may overwrite its buffers after this returns
            torch.cuda.synchronize(self.device)

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """See `RolloutEngine.weight_view`. Copies into it are on the current stream, as the engine's own work."""
        return self.model.shard_view(name, start, stop) if self.rewrite(name, start, stop, afresh) else None

    def rewrite(self, name: str, start: int, stop: int, afresh: bool = False) -> bool:
        """See `RolloutEngine.rewrite`."""
        low, high = self.model.intervals.get(name, (start, stop))
        if not low <= start < stop <= high:
            raise RefitError(f"{name} [{start}:{stop}] came, but this engine's rank holds [{low}:{high}]")
        accepted = self._ledger.accept_shard(name, start, stop)
        if accepted:
            self.model.packs.open(name, afresh)
        return accepted

    def finish_update(self) -> None:
        for name, tensor in self.model.tensors.items():
            self._ledger.settle_shards(name, *self.model.interval(tensor))
        self._ledger.finish()

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the whole tensors. Collective over the engine's ranks."""
        if self.peers.size == 1:
            return {name: tensor_checksum(view) for name, view in self.model.views.items()}
        return self.model.checksums()

    def require_weights(self) -> None:
        """Raise RefitError unless an update is complete."""
        self._ledger.require()

    # ---- memory

    @property
    def weight_bytes(self) -> int:
        models = [self.model, *([self.drafter.model] if self.drafter is not None else [])]
        return sum(buffer.nbytes for model in models for buffer in model.kit.weights)

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt with its response that the model and the cache take whatever their shares."""
        room = self.config.cache_bytes // self.cache.token_bytes
        spare = -(-self.cache.row_bytes // self.cache.token_bytes) + self.config.page_tokens
        return min(self.model.cfg.max_position, room // 2 - spare)

    def sleep(self, weights: bool = False) -> None:
        self._asleep = True
        if weights:
            self._ledger.lose()
            self.model.forget()
        if self.graphs is not None:
            self.graphs.clear()
        self.cache.release()
        self.model.scratch.clear()
        if self.drafter is not None:
            self.drafter.sleep()
        self._staged_logits = self._staged_hidden = self._staged_logits.new_empty(0)

    def wake(self) -> None:
        self._asleep = False  # the cache comes back with the first generation

    def held_bytes(self) -> dict[str, int]:
        """See `RolloutEngine.held_bytes`."""
        scratch = self.model.scratch.held_bytes + self._staged_logits.nbytes
        scratch += self.graphs.held_bytes if self.graphs is not None else 0
        weights = self.model.weight_bytes
        if self.drafter is not None:
            weights += self.drafter.model.weight_bytes
            scratch += self.drafter.held_bytes
        return {"weights": weights, "cache": self.cache.held_bytes, "scratch": scratch}

    def close(self) -> None:
        self.sleep()
        self._ledger.lose()
        self.model.release()
        if self.drafter is not None:
            self.drafter.model.release()

    # ---- generation

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """See `RolloutEngine.generate`. Raises ConfigError `engine.kv_cache_bytes` if the longest row can never fit,
        `model.max_position` if it is longer than the model's positions, `sampling.stop` without a `decode`; EngineError
        where logits are not finite."""
        return require_finite(self._generated(prompts, seeds, sampling, progress))

    def serve(
        self, pool: PromptPool, asked: list[tuple[int, int] | None], finished: Finished, sampling: SamplingParams
    ) -> Generations:
        """Return samples of the prompts of `pool`, by this rank alone, in the order in which they are taken. Calls
        `finished` for each; the pool notes its (prompt, sample) in `asked`. Raises the errors of `generate`."""
        assert self.peers.size == 1, "several ranks would have to take the same"
        self.finished = finished
        try:
            return require_finite(self._generated([], [], sampling, pool=pool, asked=asked))
        finally:
            self.finished = None

    def _generated(
        self,
        prompts: TokenLists,
        seeds: SeedLists,
        sampling: SamplingParams,
        progress: Progress | None = None,
        pool: PromptPool | None = None,
        asked: Sequence[tuple[int, int] | None] | None = None,
        begun: Sequence[int] | None = None,
    ) -> Generations:
        """Generate; samples of prompts from `pool` follow, in the order in which they are taken. `asked`: the (prompt,
        sample) with which `finished` is called for a row, None if it is of another rank. A sample ends with the token
        whose logits are not finite, with logprob NaN.

        `begun`, or a windowed `pool`, limits the call to `engine.window` decode steps. It counts the tokens of each
        prompt that belong to the response of its one sample already. Prompts get slots in their order. Unfinished
        samples are returned as they are, with length 0 if they had no slot; logprobs of tokens that were there
        before are 0.
        """
        self.require_weights()
        assert not self._asleep, "generate() on a sleeping engine: wake() it first"
        if sampling.stop and self._decode is None:
            raise ConfigError("sampling.stop", sampling.stop, "no stop strings: this engine has no decoder")
        unit = 1 if self.graphs is None else REACH  # graphs are of one shape of the cache
        assert len(prompts) == len(seeds), f"{len(prompts)} prompts, but seeds for {len(seeds)}"
        windowed = begun is not None or (pool is not None and pool.windowed)
        wanted = [PromptRequest(*one) for one in zip(prompts, seeds, begun or [0] * len(prompts), strict=True)]
        config = self.config if windowed else replace(self.config, window=0)
        use = CacheUse(self.cache.token_bytes, self.cache.row_bytes, unit)
        plan = plan_generation(wanted, sampling, config, use, pool)
        if plan.row_tokens > self.model.cfg.max_position:
            raise ConfigError(
                "model.max_position",
                self.model.cfg.max_position,
                f"at least {plan.row_tokens} (prompt + response tokens)",
            )
        self.stats = EngineStats()
        if asked is None:
            asked = [(prompt, sample) for prompt, own in enumerate(seeds) for sample in range(len(own))]
        source, invariant = self._draft_source(plan, sampling), self.model.cfg.invariant
        # whose output must not be inference tensors
        batch = Batch(plan, sampling, self.device, self.routes, source, invariant)
        with torch.inference_mode():
            self.model.packs.pack()
            self.cache.resize(plan.shape, plan.staged_tokens, self.config.cache_bytes, plan.chunk_prompts)
            while (not plan.window or batch.steps < plan.window) and self._unfinished(plan, batch):
                before = batch.finished
                moves = self.step(plan, batch, sampling)
                if plan.pool is not None:
                    plan.pool.heard(batch.new_tokens)
                if batch.finished != before:
                    if progress:
                        progress(batch.finished, plan.rows)
                    self._leave(plan, batch, asked, moves)
        self.stats.drafted_rows, self.stats.drafted_tokens = batch.drafted_rows, batch.drafted_tokens
        self.stats.accepted_tokens = batch.accepted_tokens
        self._totals = self._totals.with_later(self.stats)
        return batch.result(self.weight_version)

    def _draft_source(self, plan: GenerationPlan, sampling: SamplingParams) -> DraftSource | None:
        """Return the model of `engine.draft_model`, else the model's layer for multi-token prediction, if it has one,
        else what rows repeat."""
        if not plan.drafts:
            return None
        positions = plan.shape.row_tokens + 1
        if self.drafter is not None:
            return self.drafter.source(plan.drafts, plan.slots, positions, sampling)
        if self.model.ahead is not None:
            return AheadDrafts(plan.drafts, plan.slots, self.model, self.cache, sampling)
        return PromptLookup(plan.drafts, plan.slots, positions, self.device)

    def take_sums(self) -> Sums:
        """See `RolloutEngine.take_sums`."""
        totals, self._totals, sums = self._totals, EngineStats(), Sums()
        if self.config.page_tokens:
            sums["engine/cache_usage"] = totals.cache_usage, 1.0
            sums["engine/preempted_rows"] = float(totals.paused_rows), 1.0
        if self.config.draft_tokens:
            sums |= draft_sums(totals.steps, totals.drafted_rows, totals.drafted_tokens, totals.accepted_tokens)
        return sums

    def _unfinished(self, plan: GenerationPlan, batch: Batch) -> bool:
        with torch.inference_mode(False):
            plan.refill(batch.active)
            batch.make_room(plan.rows)
        waits = batch.waits and not plan.wants_rows(batch.active, self.cache.table)
        return batch.finished < plan.rows and not waits

    def step(self, plan: GenerationPlan, batch: Batch, sampling: SamplingParams) -> list[tuple[int, int]]:
        """Decode one token for every running row; see the top of this file. Return the slots to move, (from, to)."""
        self._find_pages(plan, batch)
        running, width, logits, heard = batch.active, batch.width, [], []
        if running:
            asked = *batch.inputs(running), self.cache, batch.longest(running)
            if self.graphs:  # they are not for experts
                logits = [self.graphs.decode(*asked, heard)]
            else:
                logits = [self.model.decode(*asked, self.routes, heard)]
            self.stats.decoded_rows += running
        logits += self._admit(plan, batch, heard)  # after decoding: graphs write to free slots
        batch.sample(logits[0] if len(logits) == 1 else torch.cat(logits), sampling)
        if batch.source is not None and batch.source.cached:
            batch.source.room = self.cache.table.grow(batch.draft_positions())
        if isinstance(batch.source, AheadDrafts):
            batch.source.read(*batch.fed(torch.cat(heard)))
        self.stats.steps += 1
        moves = batch.settle(self._stop_strings(batch, sampling))
        if running and width > 1 and batch.most_kept:
            kept = batch.kept[:running]
            if self.graphs:
                self.graphs.advance(kept, width, self.cache)
            else:
                self.model.advance(kept, batch.most_kept, self.cache)
        return moves

    def _find_pages(self, plan: GenerationPlan, batch: Batch) -> None:
        """Give running rows pages for their next tokens. Where there are none, forget rows that are kept; then pause
        those that came last. The oldest goes on in any case, so that all end."""
        table = self.cache.table
        plan.tidy(batch.active, table)
        while not table.grow(batch.next_positions()):
            if batch.forget_drafts():
                continue
            if not plan.forget_kept(batch.active, table):
                paused, moves = batch.pause()
                plan.waiting.appendleft(paused)
                self._move(moves, batch.longest(batch.active))
                plan.tidy(batch.active, table)
                self.stats.paused_rows += 1
        self.stats.cache_usage = max(self.stats.cache_usage, table.usage(batch.active))

    def _leave(
        self, plan: GenerationPlan, batch: Batch, asked: Sequence[tuple[int, int] | None], moves: list[tuple[int, int]]
    ) -> None:
        """Call `finished` for rows that have ended. Those that may continue swap slots with the rows that replace
        them."""
        length, gaps = batch.longest(batch.active), dict(moves)
        for row, slot, *outputs in batch.ended() if self.finished is not None else ():
            if (whose := asked[row]) is not None:
                self.finished(*whose, *outputs)
            if self._keeps(plan) and plan.pool.may_continue(row):
                length = max(length, plan.prefixes.keep(row, outputs[0], slot))
                moves += [(gaps[slot], slot)] if slot in gaps else []
        self._move(moves, length)

    def _keeps(self, plan: GenerationPlan) -> bool:
        return plan.pool is not None and plan.pool.in_turns and self.keeps_rows

    def _move(self, moves: list[tuple[int, int]], length: int) -> None:
        """Move the first `length` positions of slots, (from, to) each."""
        if moves:
            source, target = torch.tensor(moves, device=self.device).unbind(1)
            self.cache.move(source, target, length)

    def _admit(self, plan: GenerationPlan, batch: Batch, heard: list[Tensor]) -> list[Tensor]:
        """Give free slots to waiting rows; return float32 logits [new rows, V] of their first tokens, in slot order.
        Hidden states, which these are of, are added to `heard`."""
        logits = []
        while plan.wants_rows(batch.active, self.cache.table):
            if not plan.staged:
                self._prefill(plan, plan.next_chunk())
            taken = []
            while plan.staged and (room := plan.room(batch.active, self.cache.table)):
                prompt, first, count = plan.take(room)
                if self._keeps(plan):
                    moves = plan.prefixes.make_way(batch.active + count, plan.pool.least)
                    self._move(moves, plan.prefixes.longest)
                again = int(batch.source is not None and batch.source.cached)  # the last token's, with what follows
                self.cache.admit(prompt.staged_at, prompt.length, batch.active, count, again)
                rows = batch.add(prompt, first, count)
                if self._keeps(plan):
                    plan.prefixes.prompts |= dict.fromkeys(rows, tuple(prompt.tokens[: prompt.length - prompt.begun]))
                taken += [prompt.staged_at] * count
            if not taken:
                break
            places = torch.tensor(taken, device=self.device)
            logits.append(self._staged_logits[places])
            heard.append(self._staged_hidden[places])
        return logits

    def _prefill(self, plan: GenerationPlan, chunk: list) -> None:
        """Prefill the chunk's prompts. Where they begin with rows that were kept, compute as many tokens of each as
        the longest remainder needs, so that none is padded."""
        width = max(p.length for p in chunk)
        new = max(p.length - (p.held.length if p.held else 0) for p in chunk)
        held = [max(0, p.length - new) for p in chunk]
        padded = [[*p.tokens[n:], *[self.pad_id] * (new - p.length + n)] for p, n in zip(chunk, held, strict=True)]
        tokens = torch.tensor(padded, device=self.device)
        last = torch.tensor([p.length - n - 1 for p, n in zip(chunk, held, strict=True)], device=self.device)
        staged = self.cache.stage(len(chunk), width)
        routes = None if self.routes is None else self.routes.staged
        for p, n in zip(chunk, held, strict=True):
            if n:
                self.cache.stage_held(p.staged_at, plan.prefixes.slot(p.held.row), n)
        for p in chunk:
            if p.held:
                plan.prefixes.used(p.held)
        behind = torch.tensor(held, device=self.device) if any(held) else None
        hidden = self.model.prefill(tokens, staged, routes, self.cache.memories, last + 1, behind)
        if self.drafter is not None:
            self.drafter.prefill(tokens, behind)
        self._staged_hidden = hidden[torch.arange(len(chunk), device=self.device), last]
        self._staged_logits = self.model.logits(self._staged_hidden)
        self.stats.prefilled_prompts += len(chunk)
        self.stats.prompt_tokens += sum(p.length for p in chunk)
        self.stats.held_tokens += sum(held)

    def _stop_strings(self, batch: Batch, sampling: SamplingParams) -> Tensor | None:
        """Return bool [active, width]: the text up to each new token holds a stop string. Python over rows, so only
        where asked for.

        A token is at least one byte of text: this bounds the number of tokens that can hold a stop string. The spare
        ones absorb the changes that decoders make to the first token of a text.
        """
        if not sampling.stop:
            return None
        tail = max(len(s.encode()) for s in sampling.stop) + 8
        stopped = torch.zeros(batch.active, batch.width, dtype=torch.bool)
        for row, tails in zip(stopped, batch.tails(tail), strict=True):
            for ahead, text in enumerate(map(self._decode, tails)):
                row[ahead] = any(s in text for s in sampling.stop)
        return stopped.to(self.device)

    # ---- scoring

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """See `RolloutEngine.logprobs`."""
        self._ledger.require()
        out = torch.zeros(tokens.shape, dtype=torch.float32)
        rows = max(1, _SCORED_TOKENS // tokens.shape[1])
        with torch.inference_mode():
            self.model.packs.pack()
            for a in range(0, len(tokens), rows):
                out[a : a + rows, 1:] = self._score(tokens[a : a + rows].to(self.device), temperature)[0]
        ahead = torch.arange(tokens.shape[1]) < lengths.cpu()[:, None]
        return out * ahead  # not an inference tensor: `out` was made outside

    def top_logprobs(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `RolloutEngine.top_logprobs`."""
        self._ledger.require()
        rows = max(1, _SCORED_TOKENS // tokens.shape[1])
        with torch.inference_mode():
            self.model.packs.pack()
            scores = [self._score(chunk.to(self.device), 1.0, count) for chunk in tokens.split(rows)]
        own, values, ids = (torch.cat(columns).cpu() for columns in zip(*scores, strict=True))
        return own, values, ids

    def _score(self, tokens: Tensor, temperature: float, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.model.prefill(tokens)[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].reshape(-1, 1)
        rows = max(1, _SCORED_LOGITS // self.model.cfg.vocab_size)
        parts = []
        for h, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = self.model.logits(h).div_(temperature)
            norm = logits.logsumexp(-1, keepdim=True)
            values, ids = logits.topk(top)
            parts.append(((logits.gather(1, target) - norm).squeeze(1), values - norm, ids))
        own, values, ids = (torch.cat(columns).unflatten(0, (len(tokens), -1)) for columns in zip(*parts, strict=True))
        return own, values, ids
