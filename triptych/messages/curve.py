"""The keys that processes of one service know each other by, derived from the secret that they share.

There is one key pair for every inbox and one for every outbox: who has the secret is trusted with everything, so keys
for each process would say nothing more.
"""

from dataclasses import dataclass, field

import zmq
from blake3 import blake3
from zmq.utils import z85

_SERVER, _CLIENT = "triptych 2026-11 cluster server key", "triptych 2026-11 cluster client key"
"""What the secret is used for (see BLAKE3's key derivation mode). Processes that differ here can't talk."""


@dataclass(frozen=True)
class CurveKey:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ClusterKeys:
    """What an inbox is known by (``server``) and what an outbox is (``client``)."""

    server: CurveKey
    client: CurveKey

    @classmethod
    def derive(cls, secret: bytes) -> "ClusterKeys":
        """The same keys for the same secret, on every machine. The derivation is fast, so it is the secret that must
        be too random to guess: whoever records a connection's first packet can try secrets on it."""
        return cls(_derived(secret, _SERVER), _derived(secret, _CLIENT))


def _derived(secret: bytes, purpose: str) -> CurveKey:
    key = z85.encode(blake3(secret, derive_key_context=purpose).digest())
    return CurveKey(public=zmq.curve_public(key), secret=key)
