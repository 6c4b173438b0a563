"""All that one frontend process needs, as one value."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from triptych.config.service import ServeConfig
from triptych.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FrontendSpec:
    """All that a frontend needs as a child process. It may hold API keys, so it travels through a pipe."""

    name: str = "frontend"
    """Its name in logs and in ``triptych status``."""
    config: ServeConfig
    expects_encoders: bool
    """Whether the topology has encode instances."""
    listener: int
    """File descriptor of the listening HTTP socket, inherited from the supervisor. Connections wait there while the
    frontend is started again."""
    own_listener: int | None = None
    """The same of a socket that is this frontend's alone, where several share the other port."""
    control: str = ""
    """``HOST:PORT`` where operators reach it, one of ``takes_over``."""
    own_ports: dict[str, int] = field(default_factory=dict)
    """The port of each frontend's own listener, by the frontends' names; empty for a single one."""
    supervisor: int
    """Process id of the parent whose end ends the frontend."""
    takes_over: tuple[str, ...] = ()
    """``HOST:PORT`` of control addresses besides its own, which it takes over from the frontend before it, and leaves
    to the next one."""
    awaits_instances: bool = False
    """Whether instances run already: connections are accepted once they have joined."""

    def to_bytes(self) -> bytes:
        """Return the spec as MessagePack. Raises ConfigError for a path that isn't UTF-8."""
        try:
            return msgspec.msgpack.encode(self, enc_hook=str)
        except UnicodeEncodeError as error:
            raise ConfigError(f"paths must be UTF-8: {error.object!r}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> "FrontendSpec":
        """Read what ``to_bytes`` wrote. Raises ConfigError for anything else, and for settings out of their bounds."""
        try:
            return msgspec.msgpack.decode(data, type=cls, dec_hook=as_path)
        except ValueError as error:  # msgspec's own errors are among them
            raise ConfigError(f"a frontend's spec can't be read: {error}") from None


def as_path(kind: type, value: object) -> Path:
    """Read a path for msgspec. Raises ValueError for anything else."""
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"{kind.__name__} is not expected")
    return Path(value)
