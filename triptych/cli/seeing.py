"""Where a service that this command has started can be seen at work, on this machine."""

import os
import sys

import httpx

from triptych.config import FrontendConfig, is_loopback, is_unspecified

NEEDS_KEY = "--api-key-file FILE is needed: without keys, a service shows itself at a loopback address alone"


def is_on_desktop() -> bool:
    """Return whether a browser can open a window beside this terminal. Elsewhere, Python may start a browser for
    terminals, which would take this one."""
    return sys.stdout.isatty() and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def ways_to_see(frontend: FrontendConfig, url: str) -> tuple[str, ...]:
    """Return the address of the page and the command for a terminal; empty where both would be refused.

    ``url`` is where the HTTP server listens. Of all addresses of this machine, loopback's is returned."""
    here = httpx.URL(url)
    if is_unspecified(here.host):
        here = here.copy_with(host="::1" if ":" in here.host else "127.0.0.1")
    keys = frontend.auth.api_keys()
    if not frontend.http.ui or not (keys or is_loopback(here.host)):
        return ()
    base = str(here).rstrip("/")
    return f"{base}/ui", f"triptych top --url {base}" + (" --api-key-file FILE" if keys else "")


def seeing_note(frontend: FrontendConfig, url: str) -> str:
    """Return the same in one line, with who can see it; empty without a page."""
    if not frontend.http.ui:
        return ""
    if not (ways := ways_to_see(frontend, url)):
        return f"to see it at work, {NEEDS_KEY}"
    whom = ""
    if frontend.auth.api_keys():
        whom = ", with an API key"
    elif is_unspecified(frontend.http.host):
        whom = " from this machine alone, or with --api-key-file from anywhere"
    return f"to see it at work{whom}: {' or '.join(ways)}"
