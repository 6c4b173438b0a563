"""Hosts and ports that media may be fetched from, as set by ``--allowed-media-domains``."""

from collections.abc import Iterable

import httpx

from triptych.errors import ConfigError

_SCHEME_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """A set of exact host names. An entry without a port allows the default ports of http and https."""

    def __init__(self, entries: Iterable[str]) -> None:
        """``entries`` are ``HOST`` or ``HOST:PORT``, an IPv6 address in brackets. Raises ConfigError for others."""
        self._ports: dict[str, set[int]] = {}
        for entry in entries:
            try:
                url = httpx.URL(f"http://{entry}")
            except (httpx.InvalidURL, UnicodeError):
                url = httpx.URL("")
            if not url.raw_host or url.userinfo or url.raw_path != b"/" or url.fragment or set(entry) & set("* "):
                raise ConfigError(f"--allowed-media-domains {entry!r} is not HOST or HOST:PORT")
            ports = {url.port} if url.port is not None else set(_SCHEME_PORTS.values())
            self._ports.setdefault(host_of(url), set()).update(ports)

    def __bool__(self) -> bool:
        return bool(self._ports)

    def allow_host(self, url: httpx.URL) -> bool:
        return host_of(url) in self._ports

    def allow_port(self, url: httpx.URL) -> bool:
        return port_of(url) in self._ports.get(host_of(url), ())


def host_of(url: httpx.URL) -> str:
    """Return the host as it is compared and resolved: ASCII, lower case, without a trailing dot."""
    return url.raw_host.decode("ascii").lower().removesuffix(".")


def port_of(url: httpx.URL) -> int:
    """Return the URL's port, or the default of its scheme, ``http`` or ``https``."""
    return url.port if url.port is not None else _SCHEME_PORTS[url.scheme]
