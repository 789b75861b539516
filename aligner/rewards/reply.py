"""Replies of a server: read up to a limit, and shown without the key."""

from __future__ import annotations

import html
import re
import zlib

import httpx

MAX_BYTES = 8 << 20  # of a reply, unpacked
SHOWN = 200  # characters of it in a message
SECRET = 8  # least characters of a key that is also removed from data: shorter ones occur in texts by chance
PACKED = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB = 47  # zlib's window bits that detect the format


async def read_reply(reply: httpx.Response) -> bytes:
    """Return a reply's body, unpacked. Raises ValueError as soon as it exceeds MAX_BYTES."""
    coding = reply.headers.get("Content-Encoding", "").strip().lower()
    if coding not in ("", "identity", *PACKED):
        raise ValueError(f"expected a reply in gzip or plain, found Content-Encoding: {coding[:40]!r}")
    unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if coding in PACKED else None
    content = bytearray()
    async for chunk in reply.aiter_raw():
        try:
            if unpack is not None and unpack.eof:
                raise ValueError("a reply that cannot be unpacked: bytes behind its end")
            content += chunk if unpack is None else unpack.decompress(chunk, MAX_BYTES + 1 - len(content))
        except zlib.error as error:
            raise ValueError(f"a reply that cannot be unpacked: {error}") from None
        if len(content) > MAX_BYTES:
            raise ValueError(f"expected a reply of at most {MAX_BYTES} bytes")
    if unpack is not None and not unpack.eof:
        raise ValueError("a reply that cannot be unpacked: it is cut off")
    return bytes(content)


class Secret:
    """A key, and texts without it, in each form that a server may write: plain, escaped in JSON, HTML or an address."""

    def __init__(self, key: str):
        self.key = key
        self._pattern = re.compile("".join(map(_forms, key)), re.IGNORECASE) if key else None

    def shown(self, text: str | bytes) -> str:
        """Return the beginning of a text for a message, without the key."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        if self._pattern is None:
            return text[:SHOWN]
        shown, end = "", 0
        for match in self._pattern.finditer(text):  # over the whole text: a cut text may end within the key
            shown, end = f"{shown}{text[end : match.start()]}***", match.end()
            if len(shown) >= SHOWN:
                return shown[:SHOWN]
        return (shown + text[end : end + SHOWN])[:SHOWN]

    def kept(self, text: str) -> str:
        """Return a text of data, without a long key."""
        return text if self._pattern is None or len(self.key) < SECRET else self._pattern.sub("***", text)


def _forms(character: str) -> str:
    """Return a pattern of all ways to write a character. JSON within JSON has several backslashes."""
    code = ord(character)
    numbers = rf"\\{{1,8}}u00{code:02x}|%{code:02x}|&\#(?:{code}|x{code:x});"
    named = html.escape(character)
    return rf"(?:\\{{0,8}}{re.escape(character)}|{numbers}|{re.escape(named)})"
