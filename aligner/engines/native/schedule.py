"""Admission of prompts to slots, on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native.pages import PageTable, PoolShape
from aligner.engines.native.prefixes import Prefix, Prefixes
from aligner.errors import ConfigError
from aligner.ops.kernels.checksum import signed64
from aligner.types import SamplingParams

_PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill


class PromptRequest(NamedTuple):
    """Samples of one prompt; `begun`: the number of its tokens that are the response of its one sample already."""

    tokens: Sequence[int]
    seeds: Sequence[int]
    begun: int = 0


@dataclass(frozen=True)
class CacheUse:
    """The memory that rows take in the cache."""

    token_bytes: int  # keys and values of one position
    row_bytes: int = 0  # of a row of any length, in a slot or waiting for one
    unit: int = 1  # a slot's positions are a multiple of it if the budget allows it


@dataclass
class WaitingPrompt:
    """A prompt whose samples do not all have slots yet."""

    tokens: Sequence[int]
    seeds: Sequence[int]
    first_row: int  # its first row of the output
    started: int = 0  # samples that have had a slot
    staged_at: int = 0  # where its keys and values wait
    held: Prefix | None = None  # of a row that was kept
    begun: int = 0  # see `PromptRequest`

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class PromptPool(ABC):
    """A source of further prompts while a generation runs; see `fleet.Queues`."""

    in_turns = False  # prompts may begin with prompt and response of earlier rows: those are kept
    windowed = False  # for `engine.window` decode steps

    longest: int  # of its prompts, in tokens
    prompts: int  # about as many will be taken
    rows: int

    @abstractmethod
    def wants(self, active: int, slots: int) -> bool:
        """Return whether to take more, with `active` rows running and no prompt waiting."""

    @abstractmethod
    def take(self) -> list[PromptRequest] | None:
        """Return the next prompts, None if there will never be more."""

    def may_continue(self, row: int) -> bool:
        """Return whether a row that has ended, by its number among those taken, may be the beginning of a prompt."""
        return self.in_turns

    def least(self, rows: Sequence[int]) -> int:
        """Return the row to forget where there is no room for all; `rows` are in the order in which they ended."""
        return rows[0]

    def heard(self, new_tokens: Callable[[], list[tuple[int, list[int]]]]) -> None:  # noqa: B027 (most need not hear)
        """Hear of a step. `new_tokens` copies from the device the rows that continue, and the new tokens of each."""


@dataclass
class GenerationPlan:
    rows: int  # samples in all
    slots: int  # of rows that run
    row_tokens: int  # of a prompt and its response at most
    shape: PoolShape  # of the cache: the last token of a row is never fed back
    chunk_tokens: int
    # longest first (less padding, and long rows do not come last); in a window as they came
    waiting: deque[WaitingPrompt]
    staged: deque[WaitingPrompt]
    prefixes: Prefixes  # in slots of the cache that no row runs in
    pool: PromptPool | None = None
    chunk_prompts: int = 1 << 62  # at most in a chunk, beside its tokens
    window: int = 0  # decode steps after which rows pause; 0: they do not
    staged_tokens: int = 0  # that may be staged: more than of a chunk of new prompts where long rows are read again
    drafts: int = 0  # tokens drafted for a row
    step_tokens: int = 0  # most of a step with drafts

    def refill(self, active: int) -> None:
        """Take prompts from the pool while it offers some."""
        while self.pool is not None and self.pool.wants(active + self._pending(), self.slots):
            wanted = self.pool.take()
            if wanted is None:
                self.pool = None
                break
            new, rows = _queue(wanted, self.rows)
            self.waiting = _in_order([*self.waiting, *new], self.window)
            self.rows += rows

    def _pending(self) -> int:
        return sum(len(w.seeds) - w.started for w in (*self.waiting, *self.staged))

    def wants_rows(self, active: int, table: PageTable) -> bool:
        """Return whether to admit rows: in batches of an eighth of the slots, and of the pages, as a prefill and a copy
        per finished row would cost more than the short wait of a free slot."""
        free, pages = self.slots - active, table.free + sum(map(table.count, self.prefixes.kept_slots))
        enough = free * 8 >= self.slots and (table.whole or pages * 8 >= self.shape.pages - 1)
        return bool(free and (self.staged or self.waiting)) and (active == 0 or enough)

    def room(self, active: int, table: PageTable) -> int:
        """Return how many samples of the first staged prompt there is room for. Where pages are short, rows that are
        kept are forgotten. Each row that runs can get one more page, or it would pause soon."""
        prompt = self.staged[0]
        free = min(self.slots - active, len(prompt.seeds) - prompt.started)
        if table.whole:
            return free
        needed = prompt.length // self.shape.tokens + table.growing(active)
        self.tidy(active, table)
        while table.free < needed + free and self.forget_kept(active, table):
            pass
        return max(int(not active), min(free, table.free - needed))

    def tidy(self, active: int, table: PageTable) -> None:
        """Free the pages of slots in which no row runs or is kept."""
        table.drop(set(range(active, self.shape.slots)).difference(self.prefixes.kept_slots))

    def forget_kept(self, active: int, table: PageTable) -> bool:
        """Forget a row that is kept; return whether there was one."""
        if self.pool is None or not self.prefixes.kept_slots:
            return False
        self.prefixes.forget(self.pool.least)
        self.tidy(active, table)
        return True

    def next_chunk(self) -> list[WaitingPrompt]:
        """Stage and return the next prompts to prefill together, either all with a kept prefix or all without one."""
        width = most = 0
        for prompt in islice(self.waiting, self.chunk_prompts):
            width = max(width, prompt.length)
            if most and (most + 1) * width > self.chunk_tokens:
                break
            most += 1
        chunk, others = [], []
        while self.waiting and len(chunk) < most:
            prompt = self.waiting.popleft()
            prompt.held = self.prefixes.find(prompt.tokens)
            like = not chunk or (prompt.held is None) == (chunk[0].held is None)
            (chunk if like else others).append(prompt)
        self.waiting.extendleft(reversed(others))
        for i, prompt in enumerate(chunk):
            prompt.staged_at = i
        self.staged.extend(chunk)
        return chunk

    def take(self, free: int) -> tuple[WaitingPrompt, int, int]:
        """Return up to `free` samples of the first staged prompt: (prompt, first sample, how many)."""
        prompt = self.staged[0]
        first, count = prompt.started, min(free, len(prompt.seeds) - prompt.started)
        prompt.started += count
        if prompt.started == len(prompt.seeds):
            self.staged.popleft()
        return prompt, first, count


def plan_generation(
    wanted: Sequence[PromptRequest],
    sampling: SamplingParams,
    config: EngineConfig,
    room: CacheUse,
    pool: PromptPool | None = None,
) -> GenerationPlan:
    """Plan slots and prefill size within `engine.kv_cache_bytes`; for a window if `config` has one."""
    waiting, rows = _queue(wanted)
    prompt, expected, count = max((w.length - w.begun for w in waiting), default=1), rows, len(waiting)
    if pool is not None:
        prompt, expected, count = max(prompt, pool.longest), max(rows, pool.rows), max(count, pool.prompts)
    longest = prompt  # tokens that are read at once
    whole = positions = prompt + sampling.max_response_tokens - 1
    page = config.page_tokens if config.page_tokens < whole else 0  # 0: rows are whole
    unit = page or 1
    # behind a row's last token: drafts, and what waits for the end of a window is fed again
    spare = config.draft_tokens + bool(config.draft_tokens and config.window)
    needed = _rounded(whole + spare, unit) + page + (whole if config.window or page else longest)
    if config.window:  # paused rows are read again, even if they lack a token only: required before there are any
        longest = whole if pool is not None else max((w.length for w in waiting), default=1)
        most = (w.length + min(config.window, sampling.max_response_tokens - w.begun) for w in waiting)
        positions = whole if pool is not None else max(most, default=2) - 1
    budget, extra = config.cache_bytes // room.token_bytes, -(-room.row_bytes // room.token_bytes)  # in positions
    if needed + 2 * extra > budget:
        least = (needed + 2 * extra) * room.token_bytes
        raise ConfigError(
            "engine.kv_cache_bytes",
            config.cache_bytes,
            f"at least {least} bytes for one row of {longest} prompt tokens and "
            f"{sampling.max_response_tokens} response tokens in phase generate",
        )
    budget -= page  # of no row
    again = whole if page else longest  # tokens of a row that paused
    row, largest = positions + 1, budget - again - 2 * extra
    positions = min(_rounded(positions + spare, _rounded(room.unit, unit)), largest // unit * unit)
    each = longest + extra  # of a prompt, padded
    chunk = max(each, min(_PREFILL_TOKENS * each // longest, budget // 4, budget - positions - extra, each * count))
    budget -= max(chunk, again + extra)
    # a row begins with a page; states get at most half of the memory
    begun = min(positions, page + extra) if page else positions
    fits = max(1, min(expected, (budget - positions - extra) // (begun + extra) + 1))
    slots = min(config.max_batch, fits)
    prefixes = Prefixes(fits if pool is not None and pool.in_turns and not extra else slots)
    shape = PoolShape(prefixes.slots, prefixes.slots, positions)
    if 0 < page < positions:
        pages = positions // page
        rows_whole = min(prefixes.slots, (budget - slots * extra) // positions)
        shape = PoolShape(prefixes.slots, rows_whole * pages + 1, page, pages)
    queue = _in_order(waiting, config.window)
    plan = GenerationPlan(rows, slots, row, shape, chunk, queue, deque(), prefixes, pool, window=config.window)
    plan.staged_tokens = max(chunk, again + extra)
    plan.drafts, plan.step_tokens = config.draft_tokens, config.max_batch
    if extra:
        plan.chunk_prompts = chunk // each
        plan.chunk_tokens = plan.chunk_prompts * longest
    return plan


def _rounded(tokens: int, unit: int) -> int:
    """Round up to a multiple of the unit."""
    return -(-tokens // unit) * unit


def _queue(wanted: Sequence[PromptRequest], first_row: int = 0) -> tuple[list[WaitingPrompt], int]:
    """Return (prompts that have samples, number of samples)."""
    waiting, rows = [], 0
    for tokens, seeds, begun in wanted:
        assert len(tokens), f"prompt {len(waiting)} is empty"
        assert not begun or len(seeds) == 1, f"{len(seeds)} samples with the same {begun} tokens"
        waiting.append(WaitingPrompt(tokens, [signed64(int(s)) for s in seeds], first_row + rows, begun=begun))
        rows += len(seeds)
    return [w for w in waiting if w.seeds], rows


def _in_order(waiting: Sequence[WaitingPrompt], window: int) -> deque[WaitingPrompt]:
    return deque(waiting if window else sorted(waiting, key=lambda w: -w.length))
