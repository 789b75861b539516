"""Layout of a micro-batch's rows end to end: the position of every token, and which context-parallel rank has it.

A model computes on a flat stream of N tokens: the rows of a micro-batch [B, T] one after the other, without the
padding between them. With context parallelism a row of length L is padded to 2C equal chunks (C ranks), and rank i
has chunks i and 2C-1-i of every row. Causal attention then costs every rank the same ("zigzag", as in Megatron and
TransformerEngine).

Losses never see the stream. `to_rows` puts what was computed for each token back to [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.ops.packing.ragged import Ragged, in_rows
from aligner.ops.packing.routing import RoutingReplay


@dataclass(frozen=True)
class Segment:
    """Rows of similar length that attention computes together: queries [rows, q_width] against keys [rows, k_width]."""

    rows: int
    q_width: int
    k_width: int
    k_index: Tensor | None  # int64 [rows * k_width] into the keys of all ranks; None: they are where the queries are
    # bool [rows, 1, q_width, k_width], True where a query sees a key; None: causal, the last query seeing every key
    mask: Tensor | None
    q_start: Tensor | None = None  # int64 [rows]: the position of the first query in its row; None: 0. Keys start at 0


@dataclass(frozen=True)
class Final:
    """The tokens of a stream whose outputs are read, K of its N. The last layer computes only these, against the keys
    of all (`ops/packing/needed.py`)."""

    kept: Tensor  # int64 [K], in the stream
    segments: list[Segment]
    q_index: Tensor | None  # int64 [sum of rows * q_width], into the kept ones
    out_index: Tensor | None  # int64 [K]
    ragged: Ragged | None = None


@dataclass(frozen=True)
class Times:
    """The tokens of a layer's input that this rank sends to experts: of those of the stream that are no padding, where
    tensor ranks see the same ones, an equal share; and for how many cells of the micro-batch each stands."""

    real: Tensor | None  # int64 [n], in the layer's input; None: all
    count: Tensor  # float32 [n]
    tokens: Tensor | None = None  # int64 [n], of models that choose experts by them
    replay: RoutingReplay | None = None  # the engine's experts of these tokens, if they are replayed
    sent: dict = field(default_factory=dict)  # of layers that will be recomputed: experts, and numbers of rows sent

    @classmethod
    def of(cls, each: Tensor, ranks: int = 1, rank: int = 0) -> Times:
        """Make it of float32 [N], 0 for padding, for one of `ranks` that see all of these tokens. The host must know
        how many are not 0: create `each` there."""
        real = each.nonzero().flatten().tensor_split(ranks)[rank]
        return cls(None, each) if len(real) == len(each) else cls(real, each[real])


@dataclass(frozen=True)
class Packing:
    """The stream of one rank. N tokens, of which some are padding; B x T is the micro-batch.

    A grid is int64 [B * T]: for each cell of the micro-batch the row of the computed output that belongs there, or
    one past the last row where there is none (padding, another rank's). With `final` a stream's outputs are of the
    kept tokens, and `here`, `before` and `outputs` number those.
    """

    rows: int  # B
    width: int  # T
    source: Tensor  # int64 [N]: which token of tokens.view(-1) is here
    positions: Tensor  # int64 [N]: its position in its row
    here: Tensor  # grid over the stream: the token itself
    before: Tensor  # grid over the stream: the token before it, which predicts it
    # Outputs computed for pairs (token, token that it predicts), M of them. None: one for each token of the stream.
    # Rows that share their beginning differ in what its last token predicts.
    outputs: Tensor | None  # int64 [M]: the token, in the stream
    targets: Tensor  # int64 [M or N]: which token of tokens.view(-1) it predicts (itself at the end of a row)
    predicted: Tensor  # grid over the pairs
    lengths: Tensor  # int64 [B]: tokens of each row over all context ranks, its padding included
    segments: list[Segment]
    # queries of all segments in one gather, and back; None where the stream already is the one segment
    q_index: Tensor | None  # int64 [sum of rows * q_width]
    out_index: Tensor | None  # int64 [N]
    final: Final | None = None
    ragged: Ragged | None = None  # in place of the segments, or beside them (`ragged.in_rows`)

    @property
    def tokens(self) -> int:
        return len(self.source)

    def to_rows(self, x: Tensor, shift: bool) -> Tensor:
        """Convert x [N, ...] -> [B, T, ...], 0 where this rank has nothing. `shift`: index t gets what was computed
        at the token BEFORE it (the value of the state before it)."""
        return self._spread(x, self.before if shift else self.here)

    def times(self) -> Tensor:
        """Return float32 [N]: for how many cells of the micro-batch each token stands. Several where rows share their
        beginning, none where it is padding."""
        return torch.bincount(self.here, minlength=self.tokens + 1)[: self.tokens].float()

    def predictions(self, x: Tensor) -> Tensor:
        """Convert x [M, ...] of the pairs -> [B, T, ...]: index t gets what was computed for its prediction (its
        logprob)."""
        return self._spread(x, self.predicted)

    def _spread(self, x: Tensor, grid: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, grid).view(self.rows, self.width, *x.shape[1:])

    def additive(self, dtype: torch.dtype) -> Packing:
        """Return it with masks to add to scores of `dtype` (0 or -inf): made once here, not in every layer."""
        final = None if self.final is None else _additive(self.final, dtype)
        return _additive(replace(self, final=final), dtype)


def _additive(spans, dtype: torch.dtype):
    def added(mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)

    segments = [s if s.mask is None else replace(s, mask=added(s.mask)) for s in spans.segments]
    return replace(spans, segments=segments)


def pack(
    lengths: Tensor,
    width: int,
    *,
    padded: bool = False,
    context: int = 1,
    rank: int = 0,
    multiple: int = 1,
    over_heads: bool = False,
    share: Tensor | None = None,
    routing: Tensor | None = None,
    ragged: bool = False,
    segments: bool = False,
) -> Packing:
    """Lay rows of `lengths` (int64 [B], on the CPU; each 1 .. width) end to end for context rank `rank` of `context`.

    Rows are padded alike until N is a multiple of `multiple` (sequence parallelism splits the stream evenly); with
    `padded` every row is padded to `width` first. `over_heads`: attention sees the tokens of all context ranks (and a
    share of the heads), so its segments are whole rows. `share`: the tokens [B, T] (on the CPU). A row that begins
    like a row before it (a group's samples: with their prompt) then has only the rest of its tokens in the stream.
    Results are the same, for less work. Not with padding or context parallelism. `routing` [B, T, layers, k]: the
    tokens' experts, which shared tokens must have in common. `ragged`: rows of any length in place of segments
    (`ops/packing/ragged.py`), or with `segments` beside them, without masks.
    """
    shared, masks = None, not ragged
    if share is not None and not padded and context == 1:
        shared = shared_beginnings(share, lengths, masks, routing)
    if shared is not None:
        packing = _pack_shared(lengths, width, multiple, *shared, masks)
    else:
        packing = _pack_rows(lengths, width, padded, context, rank, multiple, over_heads, masks)
    return in_rows(packing, segments) if ragged else packing


def _pack_rows(
    lengths: Tensor, width: int, padded: bool, context: int, rank: int, multiple: int, over_heads: bool, masks: bool
) -> Packing:
    chunks = 2 * context if context > 1 else 1
    full = torch.full_like(lengths, width) if padded else lengths
    chunk = -(-full // chunks)  # tokens of a chunk, by row
    each = 2 if context > 1 else 1
    lacking = -int(chunk.sum()) * each % multiple
    chunk = _padded(chunk, (lacking if lacking % each == 0 else lacking + multiple) // each)
    per_row = each * chunk  # of this rank
    start = per_row.cumsum(0) - per_row
    row = torch.repeat_interleave(per_row)
    offset = torch.arange(len(row)) - start[row]
    if context > 1:
        half, inside = offset // chunk[row], offset % chunk[row]
        positions = torch.where(half == 0, rank, chunks - 1 - rank) * chunk[row] + inside
    else:
        positions = offset
    size, origin = len(row), row * width
    real = positions < lengths[row]
    here = torch.full((len(lengths) * width,), size)
    here[(origin + positions)[real]] = torch.arange(size)[real]
    last = positions + 1 >= lengths[row]
    before = torch.full_like(here, size)
    before[(origin + positions + 1)[~last]] = torch.arange(size)[~last]
    source = torch.where(real, origin + positions, origin)
    segments, q_index, out_index = _segments(_Places(chunk, start, context, size), rank, over_heads, masks)
    return Packing(
        rows=len(lengths),
        width=width,
        source=source,
        positions=positions,
        here=here,
        before=before,
        outputs=None,
        targets=torch.where(last, source, source + 1),
        predicted=before,
        lengths=chunk * chunks,
        segments=segments,
        q_index=q_index,
        out_index=out_index,
    )


def _padded(lengths: Tensor, count: int) -> Tensor:
    """Add `count` to the lengths, evenly over all rows: attention's cost grows with the square of a row's length."""
    each, rest = divmod(count, len(lengths))
    return lengths + each + (torch.arange(len(lengths)) >= len(lengths) - rest)


@dataclass(frozen=True)
class _Places:
    """Positions of rows in streams. chunk [B]: tokens of each chunk of a row; start [B]: where a row begins in a
    rank's stream of `size` tokens."""

    chunk: Tensor
    start: Tensor
    context: int
    size: int

    def of(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of positions [n, k] of `rows` [n] in the streams of all ranks, one after the other."""
        chunk, start = self.chunk[rows, None], self.start[rows, None]
        if self.context == 1:
            return start + positions
        which, inside = positions // chunk, positions % chunk
        low = which < self.context
        owner = torch.where(low, which, 2 * self.context - 1 - which)
        return owner * self.size + start + torch.where(low, 0, chunk) + inside


def _segments(places: _Places, rank: int, over_heads: bool, masks: bool):
    whole = places.context == 1 or over_heads
    return _whole_rows(places) if whole else _halves(places, rank, masks)


SMALL_MASK = 1 << 22  # cells of a mask that is cheap to have: one for all layers of a micro-batch


def length_classes(*lengths: Tensor) -> list[Tensor]:
    """Return row numbers by length class, three classes to a doubling: attention computes less than 1.6 times what
    rows of one length would need. With several lengths (of a row's queries, of its keys) classes are by all of them.
    """
    classes = (3 * torch.log2(torch.stack(lengths).clamp_min(16).double())).ceil()
    _, number = classes.unique(dim=1, return_inverse=True)
    return [(number == n).nonzero().flatten() for n in range(int(number.max()) + 1)]


def assign_cells(out_index: Tensor, index: Tensor, real: Tensor, done: int) -> Tensor:
    """Write to `out_index` where attention puts each query: those of a segment, `index` [rows, q_width], that are
    `real` and not padding get the cells from `done` on. Returns the flat index."""
    index, cells = index.flatten(), real.flatten().nonzero().flatten()
    out_index[index[cells]] = done + cells
    return index


def _whole_rows(places: _Places) -> tuple[list[Segment], Tensor | None, Tensor | None]:
    """Return segments of whole rows, queries and keys at the same indices into the streams of all ranks."""
    lengths = places.chunk * (2 * places.context if places.context > 1 else 1)
    if places.context == 1 and int(lengths.min()) == int(lengths.max()):
        return [Segment(len(lengths), int(lengths[0]), int(lengths[0]), None, None)], None, None
    segments, indices, cells = [], [], torch.empty(places.size * places.context, dtype=torch.int64)
    done = 0
    for rows in length_classes(lengths):
        width = int(lengths[rows].max())
        position = torch.arange(width).expand(len(rows), width)
        real = position < lengths[rows, None]
        index = assign_cells(cells, places.of(rows, position.where(real, 0)), real, done)
        segments.append(Segment(len(rows), width, width, None, None))
        indices.append(index)
        done += len(index)
    return segments, torch.cat(indices), cells


def _halves(places: _Places, rank: int, masks: bool) -> tuple[list[Segment], Tensor, Tensor]:
    """Return segments with this rank's two chunks of each row as queries, each against the row from its beginning as
    keys."""
    segments, indices, cells = [], [], torch.empty(places.size, dtype=torch.int64)
    done = 0
    for rows in length_classes(places.chunk):
        chunk = places.chunk[rows, None]
        for half, which in enumerate((rank, 2 * places.context - 1 - rank)):
            q_width, k_width = int(chunk.max()), (which + 1) * int(chunk.max())
            query = torch.arange(q_width).expand(len(rows), q_width)
            real = query < chunk
            index = assign_cells(cells, places.start[rows, None] + half * chunk + query.where(real, 0), real, done)
            key = torch.arange(k_width).expand(len(rows), k_width)
            # rows of one length can do without a mask in memory: at 128k tokens it would be the largest tensor of all
            unmasked = int(chunk.min()) == int(chunk.max()) and len(rows) * q_width * k_width > SMALL_MASK
            seen = None if unmasked or not masks else key[:, None, None, :] <= (which * chunk + query)[:, None, :, None]
            k_index = places.of(rows, key.where(key < (which + 1) * chunk, 0)).flatten()
            first = which * places.chunk[rows]
            segments.append(Segment(len(rows), q_width, k_width, k_index, seen, first))
            indices.append(index)
            done += len(index)
    return segments, torch.cat(indices), cells


# --- rows that begin alike


SHORTEST = 4  # tokens that are worth sharing
SHARED_MASK = 1 << 28  # of a segment: its queries see the shared beginning and their own row, which needs a mask


def shared_beginnings(
    tokens: Tensor, lengths: Tensor, masks: bool, routing: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return (leader, shared), int64 [B] each: row i begins with the first shared[i] tokens of row leader[i] <= i
    (itself: 0).

    A row follows the leader of the row before it if it has at least SHORTEST tokens and a quarter of its length in
    common with that row. Returns None if less than a tenth of all tokens would be saved.
    """
    count = len(lengths)
    position = torch.arange(tokens.shape[1])
    alike = (tokens[1:] == tokens[:-1]).cummin(1).values.sum(1).clamp_max(torch.minimum(lengths[1:], lengths[:-1]))
    follows = torch.zeros(count, dtype=torch.bool)
    follows[1:] = (alike >= SHORTEST) & (4 * alike >= lengths[1:])
    leader = torch.where(follows, 0, torch.arange(count)).cummax(0).values
    same = (tokens == tokens[leader]) & (position < lengths[:, None]) & (position < lengths[leader, None])
    if routing is not None:
        known = position < lengths[leader, None] - 1  # a row's last token has no routing
        same &= known & (routing == routing[leader]).flatten(2).all(2)
    # at least one token is a row's own, so that it has a query
    shared = torch.minimum(same.cummin(1).values.sum(1), lengths - 1).where(follows, 0)
    shared = shared.where(shared >= SHORTEST, 0)
    leader = leader.where(shared > 0, torch.arange(count))
    # a row that turned out to share nothing may lead others in `leader`; they share with the first one all the same
    if 10 * int(shared.sum()) < int(lengths.sum()):
        return None
    longest, own = int(lengths.max()), int((lengths - shared).max())
    return (leader, shared) if not masks or count * longest * own <= SHARED_MASK else None


def _pairs(cells: Tensor, filled: Tensor, shared: Tensor, leader: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bool [B, T]: whether the cell has its own pair, int64 [B, T]: number of its pair), of (token, token
    that it predicts)."""
    # one pair for each cell that no earlier row has: of a leader all, of others from the first own token on
    fresh = filled & (cells >= shared[:, None].clamp_min(1))
    number = torch.full_like(cells, int(fresh.sum()))
    number[fresh] = torch.arange(int(fresh.sum()))
    inherited = filled & (cells < shared[:, None]) & (cells >= 1)
    number[inherited] = number[leader][inherited]
    return fresh, number


def _pack_shared(lengths: Tensor, width: int, multiple: int, leader: Tensor, shared: Tensor, masks: bool) -> Packing:
    own = lengths - shared
    own = _padded(own, -int(own.sum()) % multiple)
    start = own.cumsum(0) - own
    row = torch.repeat_interleave(own)
    size = len(row)
    positions = shared[row] + torch.arange(size) - start[row]
    real = positions < lengths[row]
    cells = torch.arange(width).expand(len(lengths), width)

    def stream_index(rows: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of positions [n, k] of `rows` [n] in the stream."""
        first = leader[rows, None]
        inside = positions < shared[rows, None]
        return torch.where(inside, start[first] + positions, start[rows, None] + positions - shared[rows, None])

    everything = torch.arange(len(lengths))
    filled = cells < lengths[:, None]
    here = stream_index(everything, cells).where(filled, size)
    before = torch.full_like(here, size)
    before[:, 1:] = here[:, :-1].where(filled[:, 1:], size)
    fresh, number = _pairs(cells, filled, shared, leader)
    source = (row * width + positions).where(real, row * width)
    segments, q_index, out_index = [], [], torch.empty(size, dtype=torch.int64)
    done = 0
    for followers in (False, True):
        chosen = ((shared > 0) == followers).nonzero().flatten()
        for inside in length_classes(own[chosen], (shared + own)[chosen]) if len(chosen) else []:
            rows = chosen[inside]
            q_width = int(own[rows].max())
            query = torch.arange(q_width).expand(len(rows), q_width)
            real_query = query < own[rows, None]
            index = assign_cells(out_index, start[rows, None] + query.where(real_query, 0), real_query, done)
            k_width = int((shared + own)[rows].max())
            key = torch.arange(k_width).expand(len(rows), k_width)
            k_index = stream_index(rows, key.where(key < (shared + own)[rows, None], 0)).flatten()
            seen = None
            if followers and masks:
                seen = key[:, None, None, :] <= (shared[rows, None] + query)[:, None, :, None]
            segments.append(Segment(len(rows), q_width, k_width, k_index, seen, shared[rows] if followers else None))
            q_index.append(index)
            done += len(index)
    return Packing(
        rows=len(lengths),
        width=width,
        source=source,
        positions=positions,
        here=here.flatten(),
        before=before.flatten(),
        outputs=before[fresh],
        targets=(torch.arange(len(lengths))[:, None] * width + cells)[fresh],
        predicted=number.flatten(),
        lengths=own,
        segments=segments,
        q_index=torch.cat(q_index),
        out_index=out_index,
    )
