"""Comparison of the calls of ranks that were rehearsed separately. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


def mismatches(records: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first call of each group in which a rehearsed rank differs from the group's first one, as both would
    wait for ever. Ranks whose rehearsal did not end well are not compared."""
    well = {rank: record for rank, record in records.items() if record["whole"] and not record["errors"]}
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


def _call(rank: int, calls: Sequence[Sequence[str]], number: int) -> dict[str, Any]:
    """Return the call, or the position of the last one."""
    if number < len(calls):
        call, stack = calls[number]
    else:
        call, stack = "no further call", f"after {calls[-1][1]}" if calls else ""
    return {"rank": rank, "call": call, "stack": stack}
