"""Settings of language servers of other projects, which answer in place of language instances."""

import re
from dataclasses import dataclass

from triptych.config.private_files import read_private
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

VLLM, CONNECTED = "vllm", "vllm-ec"
KINDS = (VLLM, CONNECTED)
MAX_ENGINES = 64
_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
_MAX_KEY_BYTES = 4096


@dataclass(frozen=True)
class EnginesConfig(Settings):
    """Language servers of other projects."""

    engine: str = setting(
        "",
        "servers that answer in place of language instances: vllm=http://HOST:PORT, or several URLs separated by "
        "commas. Instances of this service encode media for them. They must serve the same model, and vLLM needs "
        "--enable-mm-embeds; clients must not reach them. With vllm-ec=URL, rows don't travel in requests: vLLM has "
        "the connector triptych-vllm",
    )
    engine_key_file: str = setting(
        "",
        "file with the key that these servers ask for (vLLM's --api-key); only its owner may have access",
        path=True,
    )
    engine_requests: int = setting(
        64, "most requests that one of these servers has at a time; others wait, in turns by client", ge=1, le=2**16
    )

    def check_together(self) -> None:
        _ = self.urls
        if self.engine_key_file and not self.engine:
            raise ConfigError("--engine-key-file is for --engine")

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return self.engine.partition("=")[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' URLs, without a slash at the end; none without such servers. Raises ConfigError."""
        if not self.engine:
            return ()
        kind, _, rest = self.engine.partition("=")
        if kind not in KINDS:
            raise ConfigError(f"--engine {self.engine!r} doesn't begin with {' or '.join(f'{one}=' for one in KINDS)}")
        urls = [one.strip().removeprefix(f"{kind}=").removesuffix("/").removesuffix("/v1") for one in rest.split(",")]
        for number, url in enumerate(urls):
            if not _URL.fullmatch(url):
                raise ConfigError(f"--engine: {url!r} is not http://HOST:PORT")
            if url in urls[:number]:
                raise ConfigError(f"--engine names {url} twice")
        if len(urls) > MAX_ENGINES:
            raise ConfigError(f"--engine names {len(urls)} servers, at most {MAX_ENGINES} are allowed")
        return tuple(urls)

    def key(self) -> str:
        """Return the key that the servers ask for; empty without one. Raises ConfigError for a file that has none or
        can't be used."""
        if not self.engine_key_file:
            return ""
        name = f"--engine-key-file {self.engine_key_file}"
        key = read_private(self.engine_key_file, name, _MAX_KEY_BYTES).decode("ascii", "replace").strip()
        if not 0 < len(key) <= _MAX_KEY_BYTES or not key.isprintable() or not key.isascii() or " " in key:
            raise ConfigError(f"{name} doesn't have one key in printable ASCII")
        return key
