"""The API keys that a request has."""

from collections.abc import Mapping

from blake3 import blake3


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """Return the keys that a request has: of ``Authorization: Bearer KEY``, and of Anthropic's ``X-Api-Key``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = [key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
    return [key for key in keys if key]


def scope_of(headers: Mapping[str, str]) -> str:
    """Return a digest of a request's keys: what it caches and stores is visible to requests of the same scope."""
    return blake3("\n".join(keys_of(headers)).encode()).hexdigest()
