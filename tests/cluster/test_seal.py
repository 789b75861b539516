"""Messages of a job's ranks are theirs, and their secret nobody else's."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading

import pytest

from aligner.cluster import seal
from aligner.cluster.seal import SECRET_BYTES, Seal, job_secret
from aligner.errors import ConfigError, PeerError


def test_only_what_was_signed_with_the_key_and_for_that_purpose_is_opened():
    own, other = Seal(b"key"), Seal(b"another")
    sealed = own.close(b"message", "order 1")
    assert own.open(sealed, "order 1") == b"message"
    forged = [sealed[:-1], sealed + b"!", sealed[:4] + b"x" + sealed[5:], b"", b"message", b"\0" * 32 + b"message"]
    for bad in (*forged, other.close(b"message", "order 1")):
        with pytest.raises(PeerError, match="order 1: refused a message that no rank of this job has signed"):
            own.open(bad, "order 1")
    for what in ("order 2", "order 1\0", ""):
        with pytest.raises(PeerError):
            own.open(sealed, what)


def test_launched_ranks_take_the_secret_out_of_their_environment(tmp_path):
    environ = {seal.VARIABLE: seal.new_secret()}
    secret = job_secret(tmp_path, environ)
    assert len(secret) == SECRET_BYTES and environ == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["aa" * 31, "no hexadecimal digits" * 4])
def test_what_is_no_secret_is_refused_and_not_told(tmp_path, value):
    with pytest.raises(ConfigError, match=r"ALIGNER_SECRET=.*at least 64 hexadecimal digits") as caught:
        job_secret(tmp_path, {seal.VARIABLE: value})
    assert value not in str(caught.value)


@pytest.mark.parametrize("links", [True, False])
def test_other_ranks_share_a_file_that_is_nobody_elses(tmp_path, monkeypatch, links):
    def refused(*_):
        raise OSError(errno.EOPNOTSUPP, "a file system without hard links")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    results: list[bytes] = []
    folder = tmp_path / "run"
    threads = [threading.Thread(target=lambda: results.append(job_secret(folder, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(results)) == 1 and len(results[0]) == SECRET_BYTES
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert job_secret(folder, {}) == results[0]


def test_a_file_that_another_rank_still_writes_is_waited_for(tmp_path):
    secret = job_secret(tmp_path, {})
    (path,) = tmp_path.iterdir()
    path.write_bytes(secret[:5])
    late = threading.Timer(0.2, lambda: path.write_bytes(secret))
    late.start()
    assert job_secret(tmp_path, {}) == secret
    late.join()


def test_a_secret_that_others_may_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "WAIT_S", 0.0)
    job_secret(tmp_path, {})
    (path,) = tmp_path.iterdir()
    path.chmod(0o640)
    advice = re.escape("export ALIGNER_SECRET=$(openssl rand -hex 32)")
    with pytest.raises(ConfigError, match=rf"only this user can read \(mode 0600\)\. Delete it\. .*{advice}"):
        job_secret(tmp_path, {})
    path.unlink()
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="32 bytes"):
        job_secret(tmp_path, {})
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * SECRET_BYTES)
    elsewhere.chmod(0o600)
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"can make and read.*{advice}"):
        job_secret(tmp_path, {})


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file away")
def test_a_file_of_another_user_is_refused(tmp_path):
    job_secret(tmp_path, {})
    (path,) = tmp_path.iterdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="only this user can read"):
        job_secret(tmp_path, {})
