"""Region locations with a digest, for fabrics whose library would accept, or crash on, a corrupt location."""

from blake3 import blake3

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle


def seal(fabric: str, body: str, num_bytes: int) -> RegionHandle:
    """Return a handle whose ``location`` is ``body`` and a digest of all the handle's fields.

    The digest has no key. It detects corruption and wrong sizes, but it isn't a signature.
    """
    return RegionHandle(fabric, f"{body}:{_digest(fabric, body, num_bytes)}", num_bytes)


def unseal(fabric: str, region: RegionHandle, max_length: int) -> str:
    """Return the ``body`` of a sealed handle. Raises RegionError for one that is corrupt, another fabric's, or longer
    than ``max_length``."""
    body, _, digest = region.location.rpartition(":") if len(region.location) <= max_length else ("", "", "")
    if region.fabric != fabric or digest != _digest(fabric, body, region.num_bytes):
        raise RegionError(f"not a {fabric} region of {region.num_bytes} bytes: {region.fabric[:20]}:{body[:80]}")
    return body


def _digest(fabric: str, body: str, num_bytes: int) -> str:
    return str(blake3(f"{fabric}:{body}:{num_bytes}".encode(errors="replace")).hexdigest(length=16))
