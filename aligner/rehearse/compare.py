"""Comparison of the calls of ranks that were rehearsed separately. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any


def mismatches(records: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first call of each group in which a rehearsed rank differs from the group's first one, as both would
    wait for ever. Ranks whose rehearsal did not end well are not compared."""
    well = _well(records)
    members = {key: ranks for record in well.values() for key, ranks in record["groups"].items()}
    mismatched = []
    for key, ranks in members.items():
        there = [rank for rank in ranks if rank in well]
        calls = {rank: well[rank]["sequences"].get(key, []) for rank in there}
        for rank in there[1:]:
            pairs = enumerate(zip_longest(calls[there[0]], calls[rank], fillvalue=("", "")))
            number = next((i for i, (a, b) in pairs if a[0] != b[0]), None)
            if number is not None:
                both = [_call(one, calls[one], number) for one in (there[0], rank)]
                mismatched.append({"group": key, "number": number, "calls": both})
                break
    return mismatched


def circle(records: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls in which ranks wait for each other: each for the next one, the last for the first, where each
    group's own calls agree. Ranks that were not rehearsed are taken to make theirs in time."""
    well, unlike = _well(records), {mismatch["group"] for mismatch in mismatches(records)}
    members = {key: [r for r in ranks if r in well] for one in well.values() for key, ranks in one["groups"].items()}
    events = {rank: sorted(_events(record, unlike)) for rank, record in well.items()}
    made: dict[int, Counter[str]] = {rank: Counter() for rank in well}
    position = dict.fromkeys(well, 0)

    def awaited(key: str, number: int) -> int | None:
        return next((rank for rank in members[key] if made[rank][key] <= number), None)

    before = -1
    while before != (before := sum(position.values())):
        for rank, steps in events.items():
            for _, waits, key, number in steps[position[rank] :]:
                if waits and awaited(key, number) is not None:
                    break
                made[rank][key] += not waits
                position[rank] += 1
    blocked = {rank: steps[position[rank]] for rank, steps in events.items() if position[rank] < len(steps)}
    rank, path = min(blocked, default=None), []
    while rank is not None and rank not in path:
        path.append(rank)
        rank = awaited(*blocked[rank][2:])
    calls = []
    for one in path[path.index(rank) :] if path else ():
        _, _, key, number = blocked[one]
        call = _call(one, well[one]["sequences"][key], number)
        calls.append(call | {"call": f"{key}, call {number + 1}: {call['call']}"})
    return calls


def _events(record: Mapping[str, Any], without: set[str]) -> Iterator[tuple[int, bool, str, int]]:
    """Yield the rank's calls and waits: (moment, whether it waits, group, number of the call)."""
    for key, calls in record["sequences"].items():
        for number, (_, _, called, waited) in enumerate(calls if key not in without else ()):
            yield called, False, key, number
            if waited is not None:
                yield waited, True, key, number


def _well(records: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {rank: record for rank, record in records.items() if record["whole"] and not record["errors"]}


def _call(rank: int, calls: Sequence[Sequence[str]], number: int) -> dict[str, Any]:
    """Return the call, or the position of the last one."""
    if number < len(calls):
        call, stack = calls[number][:2]
    else:
        call, stack = "no further call", f"after {calls[-1][1]}" if calls else ""
    return {"rank": rank, "call": call, "stack": stack}
