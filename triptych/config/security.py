"""Settings of who may send requests, and of how connections are encrypted."""

import ssl
from dataclasses import dataclass

from triptych.config.private_files import read_private
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

MAX_KEYS_BYTES = 2**20
ENCODE_RIGHT = "encode"
"""The right to get media's embeddings (``/v1/encode``)."""
MEDIA_RIGHT = "media"
"""The right to have media encoded ahead of questions (``/v1/media``)."""
RIGHTS = frozenset({ENCODE_RIGHT, MEDIA_RIGHT})
"""What not every client may do."""


@dataclass(frozen=True)
class AuthConfig(Settings):
    """API keys."""

    api_key: tuple[str, ...] = setting(
        (),
        "accepted API keys, separated by commas; every request needs one. Other users of this machine can read flags, "
        "so prefer a file",
        common=True,
    )
    api_key_file: str = setting(
        "",
        "file with accepted API keys, one per line; only its owner may have access. A line may give its key rights, "
        "after spaces: encode and media, which /v1/encode and /v1/media need",
        path=True,
        common=True,
    )

    def api_keys(self) -> list[str]:
        """Return all keys, including those of the file; without any, requests need no key. Raises ConfigError for a
        file that has no key or can't be used."""
        return list(self.key_rights())

    def key_rights(self) -> dict[str, frozenset[str]]:
        """Return the rights of each key. Raises what ``api_keys`` raises, and ConfigError for an unknown right."""
        rights = dict.fromkeys(self.api_key, frozenset[str]())
        if self.api_key_file:
            name = f"--api-key-file {self.api_key_file}"
            text = read_private(self.api_key_file, name, MAX_KEYS_BYTES)
            if len(text) > MAX_KEYS_BYTES:
                raise ConfigError(f"{name} has more than {MAX_KEYS_BYTES} bytes")
            found = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
            if not found:
                raise ConfigError(f"{name} has no key")
            for line in found:
                key, *given = line.split()
                if not RIGHTS.issuperset(given):
                    raise ConfigError(f"{name}: after a key, a line may have {', '.join(sorted(RIGHTS))} alone")
                rights[key] = rights.get(key, frozenset()) | frozenset(given)
        return rights


@dataclass(frozen=True)
class TlsConfig(Settings):
    """TLS."""

    ssl_certfile: str = setting(
        "", "file with the certificate and its chain, for HTTPS", path=True, also=("ssl_cert_file",)
    )
    ssl_keyfile: str = setting(
        "", "file with the certificate's private key; only its owner may have access", path=True, also=("ssl_key_file",)
    )

    def check_together(self) -> None:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together")

    def check_files(self) -> None:
        """Raise ConfigError when the certificate and its key can't be used."""
        if not self.ssl_certfile:
            return
        read_private(self.ssl_keyfile, f"--ssl-keyfile {self.ssl_keyfile}", 0)
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=""
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not PEM"
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile}: {reason}"
            ) from None


@dataclass(frozen=True)
class CorsConfig(Settings):
    """Web pages: cross-origin requests (CORS)."""

    allowed_origins: tuple[str, ...] = setting((), "origins whose pages may send requests (CORS); none unless given")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names besides this machine's by which a service without keys may be reached at a loopback --host, such as a "
        "proxy's: others are refused, since a web page's name can lead here (DNS rebinding)",
    )
