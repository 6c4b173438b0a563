"""Whether a request comes from a web page, and from which.

A browser sends requests to this machine for pages of any site. It says so in ``Sec-Fetch-Site`` or ``Origin``, which no
page can change. A page whose name has come to mean 127.0.0.1 (DNS rebinding) is of the same origin as the service for
the browser; only ``Host`` tells.
"""

import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from triptych.config import is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:@/\\\s]+)(:[0-9]{1,5})?")


def is_for_another_page(headers: Mapping[str, str], allowed_origins: Collection[str] = ()) -> bool:
    """Return whether a browser sends the request for a page that isn't of this service, nor of ``allowed_origins``."""
    origin = headers.get("origin")
    if origin is not None and ("*" in allowed_origins or origin in allowed_origins):
        return False
    if (site := headers.get("sec-fetch-site")) is not None and site not in ("none", "same-origin"):
        return True
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def names_this_machine(host: str, allowed_hosts: Collection[str] = ()) -> bool:
    """Return whether a ``Host`` header has a loopback address, ``localhost``, or one of ``allowed_hosts``, with any
    port."""
    match = _HOST.fullmatch(host)
    return match is not None and (is_loopback(match[1].strip("[]")) or match[1].lower() in allowed_hosts)
