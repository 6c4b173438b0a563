"""What ``ec_connector_extra_config`` may hold."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.config import FABRICS, ClusterConfig, TransferConfig
from triptych.errors import ConfigError


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of the connector."""

    frontends: tuple[str, ...] = ()
    """``HOST:PORT`` of each frontend's control socket."""
    host: str = "127.0.0.1"
    """Address at which frontends and encode instances reach this process."""
    secret_file: str = ""
    """The service's ``--cluster-secret-file``; needed for a host that isn't loopback."""
    fabric: str = "auto"
    """As ``--fabric`` of the service."""
    name: str = ""
    """What frontends call this engine; by default, its address."""
    pool_mb: int = 64
    """Size of the pool that rows arrive in, which may be smaller than an item."""
    rows_mb: int = 4096
    """Size of the rows that requests may have asked for at a time. Others wait."""
    cache_mb: int = 512
    """Size of the rows that are kept once no request needs them."""
    idle_wait: float = 0.1
    """Longest time, in seconds, between two steps of an engine whose requests all wait for rows."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "ConnectorSettings":
        """Return the settings of a JSON object. Raises ConfigError for a name or a value that can't be used."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in fields:
                raise ConfigError(f"ec_connector_extra_config has no {name!r}, only {', '.join(fields)}")
            values[name] = tuple(value) if isinstance(value, list) else value
            default = fields[name].default
            allowed = (int, float) if isinstance(default, float) else (type(default),)
            if not isinstance(values[name], allowed) or isinstance(values[name], bool):
                raise ConfigError(f"ec_connector_extra_config: {name} can't be {value!r}")
        settings = cls(**values)
        if not settings.frontends or not all(isinstance(one, str) for one in settings.frontends):
            raise ConfigError('ec_connector_extra_config needs "frontends": ["HOST:PORT"], where frontends are reached')
        if min(settings.pool_mb, settings.rows_mb) < 1 or settings.cache_mb < 0 or not 0 <= settings.idle_wait <= 1:
            raise ConfigError("ec_connector_extra_config: a size or a time is out of range")
        if settings.fabric not in FABRICS:
            raise ConfigError(f"ec_connector_extra_config: fabric is one of {', '.join(FABRICS)}")
        settings.cluster.check_together()
        return settings

    @property
    def cluster(self) -> ClusterConfig:
        """Address and secret, as of any process of the service."""
        return ClusterConfig(cluster_host=self.host, cluster_secret_file=self.secret_file)

    @property
    def transfer(self) -> TransferConfig:
        """The fabrics, as of any process of the service."""
        return TransferConfig(fabric=self.fabric)
