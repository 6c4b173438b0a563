"""Flags of services on a Ray cluster."""

import re

from triptych.errors import ConfigError
from triptych.topology import Role

_ADDRESS = re.compile(r"ray(?:://([^\s/:]+:\d{1,5}|\[[^\s/\]]+\]:\d{1,5}))?")
MAX_AMOUNT = 10**6
MAX_SPARES = 1000


def ray_address(on: str) -> str:
    """Return the address that ``--on`` has for Ray: HOST:PORT, or ``auto`` for the cluster of this machine. Raises
    ConfigError."""
    if (match := _ADDRESS.fullmatch(on)) is None:
        raise ConfigError(f"--on {on!r} is neither ray nor ray://HOST:PORT")
    return match[1] or "auto"


def ray_resources(text: str) -> dict[Role, dict[str, float]]:
    """Return the resources of ``--ray-resources`` by role. Names may have colons: the amount follows the last one.
    Raises ConfigError."""
    resources: dict[Role, dict[str, float]] = {}
    for part in filter(None, text.split(",")):
        role, _, asked = part.strip().partition("=")
        name, _, amount = asked.rpartition(":")
        if role.upper() not in list(Role) or not name or not _is_amount(amount):
            raise ConfigError(
                f"--ray-resources {part.strip()!r} is not ROLE=NAME:AMOUNT, where roles are {', '.join(Role)}"
            )
        resources.setdefault(Role(role.upper()), {})[name] = float(amount)
    return resources


def ray_spares(number: int) -> int:
    """Return the number of ``--ray-spares``. Raises ConfigError."""
    if not 0 <= number <= MAX_SPARES:
        raise ConfigError(f"--ray-spares {number} is not from 0 to {MAX_SPARES}")
    return number


def _is_amount(text: str) -> bool:
    try:
        return 0 < float(text) <= MAX_AMOUNT
    except ValueError:
        return False
