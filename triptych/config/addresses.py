"""Classification of host names and addresses by who can reach them."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. A name may mean any address, unless it is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_addresses(text: str) -> list[str]:
    """Return the addresses of a list that is separated by commas."""
    return [part.strip() for part in text.split(",")]


def is_unspecified(host: str) -> bool:
    """Return whether ``host`` stands for all addresses of a machine: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")
