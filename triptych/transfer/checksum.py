"""The checksum of rows on their way: XXH3-64, which is faster than memory is (docs/decisions/0009-transfer.md)."""

from collections.abc import Iterable

import xxhash

from triptych.transfer.memory import Bytes


def checksum(parts: Iterable[Bytes]) -> int:
    """Of the parts' bytes, one after the other, wherever one part ends and the next begins. Each is contiguous."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.reshape(-1).data)
    return digest.intdigest()
