"""Messages of a sandbox's first process with its host, on standard input and output: a letter, 8 bytes of length, text.

Runs inside the sandbox: imports nothing of the package.
"""

from __future__ import annotations

import os
import sys


def receive() -> tuple[bytes, bytes]:
    kind = _exactly(1)
    return kind, _exactly(int.from_bytes(_exactly(8), "little"))


def _exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            sys.exit()  # the host has closed the pipe
        data += piece
    return bytes(data)


def send(kind: bytes, text: bytes) -> None:
    data = memoryview(kind + len(text).to_bytes(8, "little") + text)
    while data:
        data = data[os.write(1, data) :]
