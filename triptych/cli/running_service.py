"""The address of a running service, its API key, and whom its certificate must be of."""

import argparse
import ssl

import httpx

from triptych.api.security import ApiKeys
from triptych.cli import flags
from triptych.config import AuthConfig
from triptych.config.http import MAX_PORT
from triptych.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


def add_ca_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help="certificates to trust for https, in PEM (default: those that certifi trusts)",
    )


def base_url(text: str) -> str:
    """Return the address as a prefix of paths. What ``serve`` prints ends with ``/v1``, and the page's with ``/ui``.
    Raises ConfigError."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL("")
    odd = url.userinfo or url.query or url.fragment or (url.port or 0) > MAX_PORT
    if url.scheme not in ("http", "https") or not url.host or odd:
        raise ConfigError(f"--url {text!r} is not an address such as {DEFAULT_URL}")
    return str(url).rstrip("/").removesuffix("/v1").removesuffix("/ui").rstrip("/")


def key(arguments: argparse.Namespace) -> str:
    """Return the first key that was given, that of the flag's file before those of the environment. Raises ConfigError
    for keys that no service accepts."""
    auth = flags.settings(AuthConfig, arguments)
    if arguments.api_key_file:
        auth = AuthConfig(api_key_file=auth.api_key_file)
    keys = auth.api_keys()
    ApiKeys(keys)  # checks them as the service does
    return next(iter(keys), "")


def trust(ca_file: str | None) -> ssl.SSLContext | bool:
    """Return what an HTTP client verifies certificates by. Raises ConfigError."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not PEM"
        raise ConfigError(f"--ca-file {ca_file}: {reason}") from None
