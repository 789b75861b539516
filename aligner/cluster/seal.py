"""Verification that a message comes from a rank of this job, by a key that only the job's user can read.

`launch`, or the user, gives ranks a secret in their environment; others share a file in the run folder. From it and
from random numbers of all ranks each start derives its own key (`handshake.py`), so that no message of an
earlier start is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from aligner.errors import ConfigError, PeerError

VARIABLE = "ALIGNER_SECRET"  # hexadecimal; set by `launch`, or by the user
SECRET_BYTES = 32
MAC_BYTES = 32
WAIT_S = 30.0  # for another rank that writes the file
FRESH = f"openssl rand -hex {SECRET_BYTES}"
# where a file system keeps no owners and modes, or others than were asked for: SMB, gcsfuse, NFS that squashes root
INSTEAD = f"If its file system cannot: export {VARIABLE}=$({FRESH}) in the batch script, before srun or mpirun"


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def job_secret(folder: Path, environ: MutableMapping[str, str] = os.environ) -> bytes:
    """Return the same bytes on all ranks. They are removed from the environment, so that the programs of a reward do
    not inherit them; else read from a file in `folder`, which the first rank makes. Raises ConfigError if others could
    read the file, or if the given text is no secret."""
    from_environment = environ.pop(VARIABLE, "")
    if from_environment:
        return _parsed(from_environment)
    path = folder / f".aligner-secret-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        private, secret = _read(path)
    except OSError as error:
        hint = f"{error.strerror}: ranks use this file to verify that they belong to the same job. {INSTEAD}"
        raise ConfigError("run.dir", str(path), "a file that this user can make and read", hint) from None
    if not private or len(secret) != SECRET_BYTES:
        expected = f"{SECRET_BYTES} bytes that only this user can read (mode 0600)"
        raise ConfigError("run.dir", str(path), expected, f"Delete it. {INSTEAD}")
    return secret


def _parsed(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES:  # without its value, which the log would keep
        expected = f"at least {2 * SECRET_BYTES} hexadecimal digits, the same on all ranks, as of {FRESH}"
        raise ConfigError(VARIABLE, f"{len(text)} characters", expected)
    return secret


def _read(path: Path) -> tuple[bool, bytes]:
    """Return whether only this user can read the file, and its content, once it is complete or nobody has written for
    `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status, secret = os.fstat(file.fileno()), file.read()
        private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not private or len(secret) >= SECRET_BYTES or time.monotonic() > deadline:
            return private, secret
        time.sleep(0.05)


def _make(path: Path) -> None:
    """Make the file. Of several ranks, the first one's counts; complete from the first moment if the file system has
    hard links."""
    own, secret = path.with_name(f"{path.name}-{secrets.token_hex(8)}"), secrets.token_bytes(SECRET_BYTES)
    try:
        _write(own, secret)
        try:
            os.link(own, path)
        except FileExistsError:
            return
        except OSError:
            with suppress(FileExistsError):
                _write(path, secret)
    finally:
        own.unlink(missing_ok=True)


def _write(path: Path, secret: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)


class Seal:
    """HMAC-SHA256 (RFC 2104) of messages under one key. The kind of a message, `what`, is signed too: one message
    cannot replace another."""

    def __init__(self, key: bytes):
        self._key = key

    def mac(self, data: bytes, what: str) -> bytes:
        name = what.encode()
        digest = hmac.new(self._key, len(name).to_bytes(4, "big") + name, hashlib.sha256)
        digest.update(data)
        return digest.digest()

    def close(self, data: bytes, what: str) -> bytes:
        return self.mac(data, what) + data

    def signed(self, mac: bytes, data: bytes, what: str) -> bool:
        return hmac.compare_digest(mac, self.mac(data, what))

    def open(self, sealed: bytes, what: str) -> bytes:
        """Return the data of a sealed message. Raises PeerError for anything else."""
        data = sealed[MAC_BYTES:]
        if not self.signed(sealed[:MAC_BYTES], data, what):
            raise PeerError(f"{what}: refused a message that no rank of this job has signed: others reach its ports")
        return data
