"""Network addresses that media may be fetched from: the public internet, and ranges that the operator allows.

Python's ``is_global`` differs between releases, so the ranges are listed here, from IANA's registries of
special-purpose addresses (RFC 6890 and its successors).
"""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_INNER_V4 = [
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; some clouds' metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's platform service, inside every virtual network
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
]
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
"""All addresses assigned to the public internet. Outside: loopback, link-local, unique local, multicast, IPv4-mapped,
IPv4-compatible and NAT64 addresses."""
_INNER_V6 = [
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, including Teredo (2001::/32), which embeds an IPv4 address
        "2001:db8::/32",
        "2002::/16",  # 6to4, which embeds an IPv4 address
        "3fff::/20",
    )
]


def may_fetch_from(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Return whether an address is on the public internet or in an ``allowed`` range. One that embeds another address
    (IPv4-mapped, 6to4, NAT64) is rejected unless its own range is allowed."""
    if any(address in network for network in allowed):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _INNER_V4)
    return address.scope_id is None and address in _PUBLIC_V6 and not any(address in network for network in _INNER_V6)
