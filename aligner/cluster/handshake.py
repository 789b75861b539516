"""Prove to each other that all processes of a store know a secret; sign the objects that they send."""

from __future__ import annotations

import pickle
import secrets
from io import BytesIO
from typing import TYPE_CHECKING, Any

from aligner.cluster.seal import Seal
from aligner.errors import PeerError

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
NONCE_BYTES = 16
_session = [Seal(b"")]  # a single rank has none to talk to
HELLO, MET, PROOF, WELCOME = (f"aligner/meet/{name}" for name in ("hello", "met", "proof", "welcome"))


def shake_hands(store: dist.Store, rank: int, world: int, secret: bytes, origin: str, expected: str) -> Seal:
    """Exchange a random number per rank. The key derives from the secret and all of them, and each rank proves that
    it has the key. `origin`, `expected`: where the store is and what the user should check, for an error."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    store.set(f"{HELLO}/{rank}", nonce)
    if rank == 0:
        store.set(MET, b"".join(store.multi_get([f"{HELLO}/{r}" for r in range(world)])))
    met = store.get(MET)
    seal = Seal(Seal(secret).mac(met, "session"))
    store.set(f"{PROOF}/{rank}", seal.mac(b"", f"proof {rank}"))
    if rank == 0:
        proofs = store.multi_get([f"{PROOF}/{r}" for r in range(world)])
        unknown = [r for r, proof in enumerate(proofs) if not seal.signed(proof, b"", f"proof {r}")]
        if unknown:
            raise PeerError(
                f"rank {unknown[0]} of {world} does not know this job's secret: expected {expected}, and nobody else "
                f"at {origin}"
            )
        store.set(WELCOME, seal.mac(b"", "welcome"))
    fresh = met[rank * NONCE_BYTES : (rank + 1) * NONCE_BYTES] == nonce and len(met) == world * NONCE_BYTES
    if not fresh or not seal.signed(store.get(WELCOME), b"", "welcome"):
        raise PeerError(
            f"the process at {origin} does not know this job's secret: expected {expected}, and nobody else there"
        )
    return seal


def session() -> Seal:
    """Return the seal of this start."""
    return _session[0]


def seal_objects(seal: Seal) -> None:
    """Sign the objects of torch's object collectives, for all of this process, from now on."""
    _session[0] = seal
    from torch.distributed import distributed_c10d

    class Pickler:
        def __init__(self, file: BytesIO):
            self.file = file

        def dump(self, value: Any) -> None:
            self.file.write(seal.close(pickle.dumps(value), "object"))

    class Unpickler:
        def __init__(self, file: BytesIO):
            self.file = file

        def load(self) -> Any:
            return pickle.loads(seal.open(self.file.read(), "object"))

    assert distributed_c10d._pickler and distributed_c10d._unpickler  # what `_object_to_tensor` and its inverse call
    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]
