"""Seeds by hashing the PURPOSE of a random choice, never its rank, world size or order of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def derive(seed: int, *words: int | str) -> int:
    """Derive a seed in [0, 2^63) from a seed and any words; the same on every machine and in every process.

    BLAKE2b over the words with their types and lengths, so that ("a", "b") and ("ab",) or 1 and "1" differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for word in (seed, *words):
        digest.update(_encode(word))
    return _to_int(digest.digest())


def request_seed(seed: int, rollout: int, prompt_id: int, index: int) -> int:
    """Return the seed of sample `index` of a prompt in a rollout: `derive(seed, "request", rollout, prompt_id,
    index)`."""
    return derive(seed, "request", rollout, prompt_id, index)


def request_seeds(seed: int, rollout: int, prompt_ids: Sequence[int], group: int) -> list[list[int]]:
    """Return `request_seed` for samples 0 .. group-1 of each prompt, one list per prompt."""
    stem = hashlib.blake2b(b"".join(map(_encode, (seed, "request", rollout))), digest_size=8)
    indices = [_encode(i) for i in range(group)]
    rows = []
    for prompt_id in prompt_ids:
        of_prompt = stem.copy()
        of_prompt.update(_encode(prompt_id))
        row = []
        for index in indices:
            digest = of_prompt.copy()
            digest.update(index)
            row.append(_to_int(digest.digest()))
        rows.append(row)
    return rows


def scatter(seed: int | np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Hash each pair of a seed and a number to uint64 (broadcast): element number + 1 of splitmix64's stream for the
    seed. Use it where `derive` is too slow, such as for every token of a rollout."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        z = np.asarray(seed, dtype=np.uint64) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _encode(word: int | str) -> bytes:
    kind, text = ("s", word) if isinstance(word, str) else ("i", str(int(word)))
    data = text.encode()
    return f"{kind}{len(data)}:".encode() + data


def _to_int(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> 1  # 63 bits: fits every signed int64 and torch.Generator
