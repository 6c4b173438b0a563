"""Classification of host names and addresses by who can reach them."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. A name may mean any address, unless it is localhost."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_and_port(text: str) -> tuple[str, str]:
    """Return the parts of ``HOST:PORT``, an IPv6 address without its brackets. Checks neither."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), port


def split_addresses(text: str) -> list[str]:
    """Return the addresses of a list that is separated by commas."""
    return [part.strip() for part in text.split(",")]


def is_unspecified(host: str) -> bool:
    """Return whether ``host`` stands for all addresses of a machine: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")
