"""CURVE keys by which the processes of a service authenticate each other, derived from the cluster secret.

All inboxes share one key pair, and all outboxes another. Keys for each process would add nothing, because every holder
of the secret is fully trusted.
"""

from dataclasses import dataclass, field

import zmq
from blake3 import blake3
from zmq.utils import z85

_SERVER, _CLIENT = "triptych 2026-11 cluster server key", "triptych 2026-11 cluster client key"
"""Key derivation contexts of BLAKE3. Processes must agree on them to connect."""


@dataclass(frozen=True)
class CurveKey:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ClusterKeys:
    """The key pairs of a service."""

    server: CurveKey
    """Key pair of every inbox."""
    client: CurveKey
    """Key pair of every outbox."""

    @classmethod
    def derive(cls, secret: bytes) -> "ClusterKeys":
        """Derive the keys from a secret; the result is the same on every machine. The derivation is fast, so the secret
        itself must be too random to guess: an attacker can test guesses against a recorded handshake."""
        return cls(_derived(secret, _SERVER), _derived(secret, _CLIENT))


def _derived(secret: bytes, purpose: str) -> CurveKey:
    key = z85.encode(blake3(secret, derive_key_context=purpose).digest())
    return CurveKey(public=zmq.curve_public(key), secret=key)
