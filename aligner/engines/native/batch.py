"""State of the running rows, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.engines.native.drafts import DraftSource, leading
from aligner.engines.native.routes import Routes
from aligner.engines.native.sampler import sample
from aligner.engines.native.schedule import GenerationPlan, WaitingPrompt
from aligner.types import LENGTH, STOP, Generations, SamplingParams

# the rows of Batch.state; `NEW`: tokens of the last step, `MOST`: tokens that a row may have in this window
ROW, SEED, POSITION, COUNT, TOKEN, NEW, MOST = range(7)


class EndedRow(NamedTuple):
    row: int
    slot: int  # after it swaps slots with the row that moves into its own
    tokens: list[int]
    logprobs: list[float]  # of these
    stopped: bool  # by a stop token or stop string


class Batch:
    """The running rows, in slot order, and the output. `state` int64 [7, slots] holds a column per slot. With drafts
    the next step may feed `width` tokens for each row."""

    def __init__(
        self,
        plan: GenerationPlan,
        sampling: SamplingParams,
        device: torch.device,
        routes: Routes | None = None,
        source: DraftSource | None = None,
        invariant: bool = False,
    ):
        shape = (plan.rows, sampling.max_response_tokens + plan.drafts)
        self.active = self.finished = self.steps = 0
        self._rows = plan.rows  # of the output; there may be room for more
        self.state = torch.zeros(7, plan.slots, dtype=torch.int64, device=device)
        # the position of every row's next token, its number among those that came, `MOST` as a position, and whether
        # it has a draft, without asking the device
        self._host = torch.zeros(4, plan.slots, dtype=torch.int64)
        self._positions, self._arrived, self._most, self._drafted = self._host
        self._came = 0
        self._prompts: dict[int, WaitingPrompt] = {}  # of rows
        self._limit, self._window = sampling.max_response_tokens, plan.window
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._full = torch.zeros_like(self._logprobs) if sampling.truncates else None
        self._lengths = torch.zeros(plan.rows, dtype=torch.int64, device=device)
        self._reasons = torch.full_like(self._lengths, LENGTH)
        # of the active rows [n, width]: the step's tokens, and whether their logits are NaN
        self._sampled = self._broken = self._lengths[:0, None]
        self.kept = self._lengths[:0]  # how many of them are the row's, in slot order before `settle`
        self.most_kept = 1  # of any row
        self._ended = self._lengths[:0]  # rows that left in the last `settle`
        self._ended_at: list[int] = []  # their slots, after swapping with the rows that move there
        self._routes, self._invariant = routes, invariant
        self._routing: list[tuple[Tensor, Tensor]] = []  # (rows that have left, theirs), on the CPU
        self.width, self._step_tokens = 1, plan.step_tokens
        self.source, self._most_position = source, plan.shape.row_tokens - 1
        self._places = (self._lengths[:0], self._lengths[:0])  # slot and number of what the last step fed
        self.drafted_tokens = self.accepted_tokens = self.drafted_rows = 0

    def add(self, prompt: WaitingPrompt, first: int, count: int) -> range:
        """Give samples [first, first + count) of the prompt the next slots; their first token is sampled next.
        Return their rows."""
        new = slice(self.active, self.active + count)
        row = prompt.first_row + first
        seeds = prompt.seeds[first : first + count]
        column = torch.tensor([range(row, row + count), seeds, [prompt.length - 1] * count])
        self.state[:COUNT, new] = column.to(self.state.device, non_blocking=True)
        self.state[COUNT, new] = prompt.begun
        self.state[NEW, new] = 1
        if prompt.begun:
            there = torch.tensor(prompt.tokens[-prompt.begun :], device=self.state.device)
            self._tokens[row, : prompt.begun] = there
        left = self._window - self.steps if self._window else self._limit
        self.state[MOST, new] = prompt.begun + left
        self._host[:, new] = torch.tensor([prompt.length - 1, 0, prompt.length - 1 + left, 0])[:, None]
        self._arrived[new] = torch.arange(self._came, self._came + count)
        if self.source is not None:
            self.source.add(new, torch.tensor(prompt.tokens))
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
        self._move(last, slot)
        again = WaitingPrompt(tokens, [prompt.seeds[row - prompt.first_row]], row, begun=count)
        return again, [(last, slot)] if slot < last else []

    def _move(self, source: Tensor | int, target: Tensor | int) -> None:
        """Move columns of slots `source` to `target`, on the CPU."""
        self._host[:, target] = self._host[:, source]
        if isinstance(source, Tensor):
            source, target = source.to(self.state.device), target.to(self.state.device)
        self.state[:, target] = self.state[:, source]
        if self.source is not None:
            self.source.move(source, target)

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
        """Return the tokens of slots [0, running) to feed and their positions, int64 [running, width]."""
        tokens, positions = self.state[TOKEN, :running, None], self.state[POSITION, :running, None]
        if self.width > 1:
            tokens = torch.cat([tokens, self.source.drafts[:running]], 1)
            positions = positions + torch.arange(self.width, device=positions.device)
        return tokens, positions

    def next_positions(self) -> Tensor:
        """Return the positions of the active rows' next tokens, the last ones of their drafts, int64 on the CPU."""
        return self._positions[: self.active] + self.width - 1

    def forget_drafts(self) -> bool:
        """Let the next step feed no drafts; return whether there were any."""
        had, self.width = self.width > 1, 1
        return had

    def longest(self, rows: int) -> int:
        """Return one more than the largest position among slots [0, rows)."""
        return int(self._positions[:rows].max()) + self.width if rows else 0

    @property
    def waits(self) -> bool:
        """Whether each active row has all its tokens of the window."""
        own = self._positions[: self.active] >= self._most[: self.active]
        return bool(self.source is not None and self.active and own.all())

    def sample(self, logits: Tensor, sampling: SamplingParams) -> None:
        """Sample a token behind each that was fed, and a first one for every new row, from logits [fed + new, V];
        write them to the output. Drafts that are what was sampled were fed in its place."""
        state, width = self.state[:, : self.active], self.width
        slots, ahead = slice(None), 0
        running = (len(logits) - self.active) // (width - 1) if width > 1 else self.active
        if width > 1:
            each = torch.arange(self.active, device=state.device)
            slots = torch.cat([each[:running, None].expand(-1, width).flatten(), each[running:]])
            ahead = torch.arange(width, device=state.device).repeat(running)
            ahead = torch.cat([ahead, torch.zeros_like(each[running:])])
        row, seed, count = state[ROW][slots], state[SEED][slots], state[COUNT][slots] + ahead
        picked = sample(logits, seed, count, sampling, self._invariant)
        self._tokens[row, count] = picked.tokens
        self._logprobs[row, count] = picked.logprobs
        if self._full is not None:
            self._full[row, count] = picked.full_logprobs
        self._sampled, self._broken = picked.tokens[:, None], picked.logprobs.isnan()[:, None]
        self.kept = torch.ones_like(state[ROW])
        if width > 1:
            self._places = slots, ahead
            self._sampled, self._broken = (self._wide(x[:, 0]) for x in (self._sampled, self._broken))
            self.kept[:running] += leading(self._sampled[:running, :-1] == self.source.drafts[:running])

    def _wide(self, values: Tensor) -> Tensor:
        """Return values [fed + new, ...] -> [active, width, ...], zeros where a row has fewer."""
        if self.width == 1:
            return values[:, None]
        out = values.new_zeros(self.active, self.width, *values.shape[1:])
        out[self._places] = values
        return out

    def draft_positions(self) -> Tensor:
        """Return the last positions that a source of drafts writes for the active rows after this step, int64 on the
        CPU."""
        return (self._positions[: self.active] + self.width + self.source.count - 1).clamp_max(self._most_position)

    def fed(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return, of the active rows, hidden states [fed + new, H] of what the last step fed as [active, width, H], the
        tokens sampled behind, int64 [active, width], the position of each row's first, and one more than the largest.
        """
        position = self.state[POSITION, : self.active]
        return self._wide(hidden), self._sampled, position, self.longest(self.active)

    def tails(self, width: int) -> Iterator[list[list[int]]]:
        """Yield for every active row, on the host, the last `width` response tokens behind each of its new ones."""
        rows, counts = self.state[[ROW, COUNT], : self.active].tolist()
        for tokens, count, kept in zip(self._tokens[rows].tolist(), counts, self.kept.tolist(), strict=True):
            yield [tokens[max(0, stop - width) : stop] for stop in range(count + 1, count + 1 + kept)]

    def new_tokens(self) -> list[tuple[int, list[int]]]:
        """Return the active rows and their tokens of the last step, on the host."""
        rows, counts, new = self.state[[ROW, COUNT, NEW], : self.active].tolist()
        outputs = self._tokens[rows].tolist()
        return [(row, own[n - k : n]) for row, own, n, k in zip(rows, outputs, counts, new, strict=True)]

    def settle(self, stopped: Tensor | None) -> list[tuple[int, int]]:
        """Let finished rows leave; move the last active rows into their slots. Return these moves (from, to).
        `stopped` bool [active, width]: tokens that end a stop string.

        Copying the flags to the host is the step's one synchronisation with the device: how many rows remain decides
        the shapes of the next step, and whether there is one.
        """
        state, width = self.state[:, : self.active], self.width
        stop = torch.isin(self._sampled, self._stops) if len(self._stops) else None
        if stopped is not None:
            stop = stopped if stop is None else stop | stopped
        ends = (state[COUNT][:, None] + torch.arange(1, width + 1, device=state.device) >= self._limit) | self._broken
        if stop is not None:
            ends = ends | stop
        done = ends[:, 0]
        if self.source is None:
            state[TOKEN] = self._sampled[:, 0]
            state[POSITION : COUNT + 1] += 1
        else:
            done = self._keep(ends)
        if stop is not None:
            last = (state[NEW] - 1).clamp_min(0)[:, None]
            self._reasons[state[ROW]] = torch.where(stop.gather(1, last)[:, 0] & done, STOP, LENGTH)
        self._lengths[state[ROW]] = state[COUNT]
        flags = self._report(done)
        self.steps += 1
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
            self._move(movers, gaps)
        return moves

    def _keep(self, ends: Tensor) -> Tensor:
        """Keep the new tokens up to the first that ends its row, and as many as its window has. Return whether rows
        end."""
        state, first = self.state[:, : self.active], leading(~ends)
        kept = self.kept.minimum(state[MOST] - state[COUNT])
        done, kept = first < kept, kept.minimum(first + 1)
        self.kept = kept
        last = self._sampled.gather(1, (kept - 1).clamp_min(0)[:, None])[:, 0]
        self.source.write(state[POSITION] + 1, self._sampled)
        state[TOKEN] = last.where(kept > 0, state[TOKEN])
        state[POSITION : COUNT + 1] += kept
        state[NEW] = kept
        return done

    def _report(self, done: Tensor) -> Tensor:
        """Copy which rows are done to the host, draft for the next step, and count what became of the last drafts."""
        if self.source is None:
            self._positions[: self.active] += 1
            return done.cpu()
        state, width = self.state[:, : self.active], self.source.count + 1
        repeats = torch.zeros_like(done)
        longest = int(self._positions[: self.active].max()) + self.width + 1
        if self.active * width <= self._step_tokens:
            repeats = self.source.draft(state[POSITION], longest, state[SEED], state[COUNT])
        else:
            self.source.follow(state[POSITION], longest)
        report = torch.stack([done.long(), state[NEW], (repeats & ~done).long()]).cpu()
        drafted = self._drafted[: self.active] * (self.width > 1)
        self.drafted_rows += int(drafted.sum())
        self.drafted_tokens += int(drafted.sum()) * self.source.count
        self.accepted_tokens += int((drafted * (report[1] - 1).clamp_min(0)).sum())
        self._positions[: self.active] += report[1]
        self.most_kept = int(report[1].max())
        self._drafted[: self.active] = report[2]
        self.width = width if report[2].any() else 1
        return report[0].bool()

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
            """Cut to the rows' own tokens: drafts may have left others behind them."""
            own = torch.arange(width) < self._lengths[:rows, None].cpu()
            return columns[:rows, :width].cpu().where(own, 0).contiguous()

        return Generations(
            tokens=cut(self._tokens),
            lengths=self._lengths[:rows].cpu(),
            logprobs=cut(self._logprobs),
            finish_reason=self._reasons[:rows].cpu(),
            weight_version=version,
            full_logprobs=None if self._full is None else cut(self._full),
            routing=None if self._routes is None else self._routes.joined(self._routing, rows),
        )
