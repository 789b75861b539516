"""Writes calls down, and fails at the one it was told to fail at."""

import os
import time
from collections import Counter

COUNTS: Counter = Counter()
LOG = os.environ.get("FAKE_TRTLLM_LOG")  # of the test that imports it: an engine of the one before may still end


def note(name: str, detail: str = "") -> None:
    COUNTS[name] += 1
    if LOG:
        with open(LOG, "a") as file:
            file.write(f"{name} {detail}".strip() + "\n")
    for word, act in (("CRASH", _crash), ("RAISE", _raise), ("HANG", _hang)):
        if wanted := os.environ.get(f"FAKE_TRTLLM_{word}"):
            call, _, count = wanted.partition(":")
            if call == name and COUNTS[name] == int(count or 1):
                act(name)


def _crash(name: str) -> None:
    os.write(2, f"CUDA error: an illegal memory access was encountered in {name}\n".encode())
    os.abort()


def _raise(name: str) -> None:
    raise RuntimeError(f"out of memory in {name}")


def _hang(name: str) -> None:
    os.write(2, f"waiting for a barrier in {name}\n".encode())
    time.sleep(3600)
