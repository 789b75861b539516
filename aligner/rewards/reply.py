"""What a server replies: read as far as a limit, and shown without the key."""

from __future__ import annotations

import html
import re
import zlib

import httpx

MAX_BYTES = 8 << 20  # of a reply, unpacked
SHOWN = 200  # characters of it in a message
SECRET = 8  # characters of a key at least that is taken out of data, too: shorter ones stand in many texts by chance
PACKED = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB = 47  # zlib's word for: whichever of the two it begins like


async def read_reply(reply: httpx.Response) -> bytes:
    """Its body, unpacked. Raises ValueError, as soon as more than MAX_BYTES are there."""
    coding = reply.headers.get("Content-Encoding", "").strip().lower()
    if coding not in ("", "identity", *PACKED):
        raise ValueError(f"expected a reply in gzip or plain, found Content-Encoding: {coding[:40]!r}")
    unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if coding in PACKED else None
    found = bytearray()
    async for part in reply.aiter_raw():
        try:
            if unpack is not None and unpack.eof:
                raise ValueError("a reply that cannot be unpacked: bytes behind its end")
            found += part if unpack is None else unpack.decompress(part, MAX_BYTES + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"a reply that cannot be unpacked: {error}") from None
        if len(found) > MAX_BYTES:
            raise ValueError(f"expected a reply of at most {MAX_BYTES} bytes")
    if unpack is not None and not unpack.eof:
        raise ValueError("a reply that cannot be unpacked: it is cut off")
    return bytes(found)


class Secret:
    """A key, and texts without it, however a server writes it: as it is, escaped in JSON, HTML or an address."""

    def __init__(self, key: str):
        self.key = key
        self._pattern = re.compile("".join(map(_forms, key)), re.IGNORECASE) if key else None

    def shown(self, text: str | bytes) -> str:
        """The beginning of a text for a message."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        if self._pattern is None:
            return text[:SHOWN]
        shown, end = "", 0
        for match in self._pattern.finditer(text):  # over the whole text: what is cut off may end within the key
            shown, end = f"{shown}{text[end : match.start()]}***", match.end()
            if len(shown) >= SHOWN:
                return shown[:SHOWN]
        return (shown + text[end : end + SHOWN])[:SHOWN]

    def kept(self, text: str) -> str:
        """A text that is data."""
        return text if self._pattern is None or len(self.key) < SECRET else self._pattern.sub("***", text)


def _forms(character: str) -> str:
    """A pattern of all ways to write it. JSON within JSON has several backslashes."""
    code = ord(character)
    numbers = rf"\\{{1,8}}u00{code:02x}|%{code:02x}|&\#(?:{code}|x{code:x});"
    named = html.escape(character)
    return rf"(?:\\{{0,8}}{re.escape(character)}|{numbers}|{re.escape(named)})"
