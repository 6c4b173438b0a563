"""All that one instance process needs, as one value."""

from dataclasses import dataclass, field

import msgspec

from triptych.config.addresses import split_addresses
from triptych.config.cluster import ClusterConfig
from triptych.config.encode import EncodeConfig
from triptych.config.engine import EngineConfig
from triptych.config.lease import LeaseConfig
from triptych.config.observe import ObserveConfig
from triptych.config.transfer import TransferConfig
from triptych.errors import ConfigError
from triptych.topology import Role


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """All that one instance process needs. It holds no secret: those stay in the files that it names."""

    model: str
    """The checkpoint folder, an absolute path."""
    role: Role
    name: str
    """The instance's name in logs, metrics and ``triptych status``."""
    join: str
    """The control address of each frontend, as ``HOST:PORT``, separated by commas."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """``threads`` and ``kv_cache_memory`` are those of this instance alone."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    supervisor: int = 0
    """Process id of the parent whose end ends the instance, or 0 for none."""

    incarnation: int = 0
    """Larger for a later process of the same name; 0 for the time of its start, in milliseconds."""

    @property
    def joins(self) -> list[str]:
        """The control address of each frontend."""
        return split_addresses(self.join)

    @property
    def num_ranks(self) -> int:
        """Processes that the instance consists of."""
        return self.engine.tensor_parallel_size.of(self.role)

    def to_bytes(self) -> bytes:
        """Return the spec as MessagePack, which has infinite numbers, unlike JSON. Raises ConfigError for a path that
        isn't UTF-8."""
        try:
            return msgspec.msgpack.encode(self)
        except UnicodeEncodeError as error:
            raise ConfigError(f"paths must be UTF-8: {error.object!r}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> "InstanceSpec":
        """Read what ``to_bytes`` wrote. Raises ConfigError for anything else, and for settings out of their bounds."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"an instance's spec can't be read: {error}") from None
