"""Locations with a digest: for fabrics whose library would believe, or stumble over, a garbled one."""

from blake3 import blake3

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle


def seal(fabric: str, body: str, num_bytes: int) -> RegionHandle:
    """A handle whose ``location`` is ``body`` and a digest of all that the handle says. No secret goes into it: it
    tells accidents, and sizes that aren't the region's, but isn't a signature."""
    return RegionHandle(fabric, f"{body}:{_digest(fabric, body, num_bytes)}", num_bytes)


def unseal(fabric: str, region: RegionHandle, max_length: int) -> str:
    """What was sealed. Raises RegionError when the handle isn't as it was, another fabric's, or longer than that."""
    body, _, digest = region.location.rpartition(":") if len(region.location) <= max_length else ("", "", "")
    if region.fabric != fabric or digest != _digest(fabric, body, region.num_bytes):
        raise RegionError(
            f"not a region of {fabric}'s, or not of {region.num_bytes} bytes: {region.fabric[:20]}:{body[:80]}"
        )
    return body


def _digest(fabric: str, body: str, num_bytes: int) -> str:
    return str(blake3(f"{fabric}:{body}:{num_bytes}".encode(errors="replace")).hexdigest(length=16))
