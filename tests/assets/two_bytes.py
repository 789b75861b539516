"""A reward for emitting one fixed two-byte string, with partial credit per byte: it shows whether refits happen."""

TARGET = b"Qz"


def two_bytes(samples, target: str = TARGET.decode()):
    """Half a point for each of the first two bytes that is the target's; nothing is subtracted for what follows."""
    wanted = target.encode()
    return [
        sum(a == b for a, b in zip(s.response.encode(errors="replace"), wanted, strict=False)) / len(wanted)
        for s in samples
    ]
