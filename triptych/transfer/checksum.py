"""Checksum of transferred rows: XXH3-64, which is fast enough not to limit a transfer
(docs/decisions/0009-transfer.md)."""

from collections.abc import Iterable

import xxhash

from triptych.transfer.memory import Bytes


def checksum(parts: Iterable[Bytes]) -> int:
    """Return the checksum of the parts' concatenation. Where it is cut into parts doesn't matter; each is
    contiguous."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.reshape(-1).data)
    return digest.intdigest()
