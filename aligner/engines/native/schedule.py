"""Admission of prompts to slots (`GenerationPlan`, on the host) and state of the running rows (`Batch`, on the
device)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native.pages import PageTable, PoolShape
from aligner.engines.native.prefixes import Prefix, Prefixes
from aligner.engines.native.routes import Routes
from aligner.engines.native.sampler import sample
from aligner.errors import ConfigError
from aligner.ops.kernels.checksum import signed64
from aligner.types import LENGTH, STOP, Generations, SamplingParams

_PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill
ROW, SEED, POSITION, COUNT, TOKEN = range(5)  # the rows of Batch.state


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

    def heard(self, last_tokens: Callable[[], tuple[list[int], list[int]]]) -> None:  # noqa: B027 (most need not hear)
        """Hear of a step. `last_tokens` copies from the device the rows that continue, and the token of each."""


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
    needed = _rounded(whole, unit) + page + (whole if config.window or page else longest)
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
    positions = min(_rounded(positions, _rounded(room.unit, unit)), largest // unit * unit)
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


class EndedRow(NamedTuple):
    row: int
    slot: int  # after it swaps slots with the row that moves into its own
    tokens: list[int]
    logprobs: list[float]  # of these
    stopped: bool  # by a stop token or stop string


class Batch:
    """The running rows, in slot order, and the output. `state` int64 [5, slots] holds a column per slot."""

    def __init__(
        self, plan: GenerationPlan, sampling: SamplingParams, device: torch.device, routes: Routes | None = None
    ):
        shape = (plan.rows, sampling.max_response_tokens)
        self.active = self.finished = 0
        self._rows = plan.rows  # of the output; there may be room for more
        self.state = torch.zeros(5, plan.slots, dtype=torch.int64, device=device)
        # the position of every row's next token, and its number among those that came, without asking the device
        self._host = torch.zeros(2, plan.slots, dtype=torch.int64)
        self._positions, self._arrived = self._host
        self._came = 0
        self._prompts: dict[int, WaitingPrompt] = {}  # of rows
        self._limit = sampling.max_response_tokens
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._full = torch.zeros_like(self._logprobs) if sampling.truncates else None
        self._lengths = torch.zeros(plan.rows, dtype=torch.int64, device=device)
        self._reasons = torch.full_like(self._lengths, LENGTH)
        self._broken = torch.zeros(0, dtype=torch.bool, device=device)  # of the active rows: the last logits are NaN
        self._ended = self._lengths[:0]  # rows that left in the last `settle`
        self._ended_at: list[int] = []  # their slots, after swapping with the rows that move there
        self._routes = routes
        self._routing: list[tuple[Tensor, Tensor]] = []  # (rows that have left, theirs), on the CPU

    def add(self, prompt: WaitingPrompt, first: int, count: int) -> range:
        """Give samples [first, first + count) of the prompt the next slots; their first token is sampled next.
        Return their rows."""
        new = slice(self.active, self.active + count)
        row = prompt.first_row + first
        seeds = prompt.seeds[first : first + count]
        column = torch.tensor([range(row, row + count), seeds, [prompt.length - 1] * count])
        self.state[:COUNT, new] = column.to(self.state.device, non_blocking=True)
        self.state[COUNT, new] = prompt.begun
        if prompt.begun:
            there = torch.tensor(prompt.tokens[-prompt.begun :], device=self.state.device)
            self._tokens[row, : prompt.begun] = there
        self._positions[new] = prompt.length - 1
        self._arrived[new] = torch.arange(self._came, self._came + count)
        self._came += count
        self._prompts |= dict.fromkeys(range(row, row + count), prompt)
        self.active += count
        return range(row, row + count)

    def pause(self) -> tuple[WaitingPrompt, list[tuple[int, int]]]:
        """Let the row that came last leave before it has ended. Return what is to be prefilled for its next token, and
        the move of the last active row into its slot, (from, to)."""
        slot, last = int(self._arrived[: self.active].argmax()), self.active - 1
        self._take_routes(torch.tensor([slot]))
        row, count = self.state[[ROW, COUNT], slot].tolist()
        prompt = self._prompts[row]
        tokens = [*prompt.tokens[: prompt.length - prompt.begun], *self._tokens[row, :count].tolist()]
        self.active = last
        self._host[:, slot] = self._host[:, last]
        self.state[:, slot] = self.state[:, last]
        again = WaitingPrompt(tokens, [prompt.seeds[row - prompt.first_row]], row, begun=count)
        return again, [(last, slot)] if slot < last else []

    def make_room(self, rows: int) -> None:
        """Make room for the output of `rows` samples in all, and for half as many again, where they come one by one."""
        self._rows = rows
        if rows <= len(self._lengths):
            return
        missing = rows + rows // 2 - len(self._lengths)

        def longer(t: Tensor, value: int = 0) -> Tensor:
            return torch.cat([t, t.new_full((missing, *t.shape[1:]), value)])

        self._tokens, self._logprobs, self._lengths = (longer(t) for t in (self._tokens, self._logprobs, self._lengths))
        self._full = None if self._full is None else longer(self._full)
        self._reasons = longer(self._reasons, LENGTH)

    def inputs(self, running: int) -> tuple[Tensor, Tensor]:
        return self.state[TOKEN, :running], self.state[POSITION, :running]

    def next_positions(self) -> Tensor:
        """Return the positions of the active rows' next tokens, int64 on the CPU."""
        return self._positions[: self.active]

    def longest(self, rows: int) -> int:
        """Return one more than the largest position among slots [0, rows)."""
        return int(self._positions[:rows].max()) + 1 if rows else 0

    def sample(self, logits: Tensor, sampling: SamplingParams) -> None:
        """Sample a token for every active row from logits [active, V]; write it to state and output."""
        state = self.state[:, : self.active]
        row, count = state[ROW], state[COUNT]
        picked = sample(logits, state[SEED], count, sampling)
        state[TOKEN] = picked.tokens
        self._tokens[row, count] = picked.tokens
        self._logprobs[row, count] = picked.logprobs
        self._broken = picked.logprobs.isnan()
        if self._full is not None:
            self._full[row, count] = picked.full_logprobs
        state[POSITION : COUNT + 1] += 1
        self._positions[: self.active] += 1

    def tails(self, width: int) -> Iterator[list[int]]:
        """Yield the last `width` response tokens of every active row, on the host."""
        rows, counts = self.state[ROW, : self.active], self.state[COUNT, : self.active].tolist()
        for tokens, count in zip(self._tokens[rows].tolist(), counts, strict=True):
            yield tokens[max(0, count - width) : count]

    def last_tokens(self) -> tuple[list[int], list[int]]:
        """Return the active rows and their last tokens, on the host."""
        rows, tokens = self.state[[ROW, TOKEN], : self.active].tolist()
        return rows, tokens

    def settle(self, stopped: Tensor | None) -> list[tuple[int, int]]:
        """Let finished rows leave; move the last active rows into their slots. Return these moves (from, to).

        Copying the flags to the host is the step's one synchronisation with the device: how many rows remain decides
        the shapes of the next step, and whether there is one.
        """
        state = self.state[:, : self.active]
        stop = torch.isin(state[TOKEN], self._stops) if len(self._stops) else None
        if stopped is not None:
            stop = stopped if stop is None else stop | stopped
        done = (state[COUNT] >= self._limit) | self._broken
        if stop is not None:
            done = done | stop
            self._reasons[state[ROW]] = torch.where(stop, STOP, LENGTH)
        self._lengths[state[ROW]] = state[COUNT]
        flags = done.cpu()
        left = self.active - int(flags.sum())
        if left == self.active:
            self._ended, self._ended_at = self._ended[:0], []
            return []
        slots = flags.nonzero().squeeze(1)
        self._ended = state[ROW, slots.to(state.device)]  # `done` as index would synchronise again
        self._take_routes(slots)
        self.finished += self.active - left
        gaps = flags[:left].nonzero().squeeze(1)
        movers = (~flags[left:]).nonzero().squeeze(1) + left
        self.active = left
        moves = list(zip(movers.tolist(), gaps.tolist(), strict=True))
        self._ended_at = [source for source, _ in moves] + slots[len(moves) :].tolist()
        if moves:
            self._host[:, gaps] = self._host[:, movers]
            gaps, movers = gaps.to(self.state.device), movers.to(self.state.device)
            self.state[:, gaps] = self.state[:, movers]
        return moves

    def _take_routes(self, slots: Tensor) -> None:
        """Copy the routes of rows that leave their `slots`, int64 [m] on the CPU: of tokens that were fed, not of the
        last ones, which stand at the rows' positions."""
        if self._routes is not None and len(slots):
            rows = self.state[ROW, slots.to(self.state.device)].cpu()
            self._routing.append((rows, self._routes.take(slots, self._positions[slots])))

    def ended(self) -> Iterator[EndedRow]:
        """Yield the rows that left in the last `settle`, on the host."""
        columns = self._tokens, self._logprobs, self._lengths, self._reasons
        lists = (column[self._ended].tolist() for column in columns)
        for row, slot, tokens, logprobs, length, reason in zip(
            self._ended.tolist(), self._ended_at, *lists, strict=True
        ):
            yield EndedRow(row, slot, tokens[:length], logprobs[:length], reason == STOP)

    def result(self, version: int) -> Generations:
        """Return CPU tensors, rows cut to the longest response."""
        with torch.inference_mode():
            self._take_routes(torch.arange(self.active))  # of a window, which has passed
        rows = self._rows
        width = int(self._lengths[:rows].max()) if rows else 0

        def cut(columns: Tensor) -> Tensor:
            return columns[:rows, :width].cpu().contiguous()

        return Generations(
            tokens=cut(self._tokens),
            lengths=self._lengths[:rows].cpu(),
            logprobs=cut(self._logprobs),
            finish_reason=self._reasons[:rows].cpu(),
            weight_version=version,
            full_logprobs=None if self._full is None else cut(self._full),
            routing=None if self._routes is None else self._routes.joined(self._routing, rows),
        )
