"""All settings of one service."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from triptych.config.cluster import ClusterConfig
from triptych.config.encode import EncodeConfig
from triptych.config.engine import EngineConfig
from triptych.config.frontend import FrontendConfig
from triptych.config.instance_spec import InstanceSpec
from triptych.config.lease import LeaseConfig
from triptych.config.observe import ObserveConfig
from triptych.config.settings import Settings
from triptych.config.transfer import TransferConfig
from triptych.topology import Role, Topology


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings of one service."""

    model: Path
    """The checkpoint folder."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def having(self, settings: Mapping[str, Any]) -> "ServeConfig":
        """Return a copy with these settings, by their own names. Raises ConfigError, and TypeError for a name that no
        group has."""
        groups: dict[str, Any] = {}
        left = dict(settings)
        for item in fields(self):
            group = getattr(self, item.name)
            if isinstance(group, Settings):
                own = {setting.name: left.pop(setting.name) for setting in fields(group) if setting.name in left}
                groups[item.name] = replace(group, **own)
        return replace(self, frontend=self.frontend.having(left), **groups)

    def instance(self, role: Role, name: str, join: str) -> InstanceSpec:
        """Return the spec of an instance that is alone on its machine."""
        threads = self.engine.threads_per_process(self.engine.tensor_parallel_size.of(role))
        return InstanceSpec(
            model=str(self.model),
            role=role,
            name=name,
            join=join,
            engine=replace(self.engine, threads=threads),
            encode=self.encode,
            transfer=self.transfer,
            cluster=self.cluster,
            lease=self.lease,
            observe=self.observe,
        )

    def instances(self, topology: Topology, join: str) -> list[InstanceSpec]:
        """Return the specs of a topology's instances, ``e0``, ``e1``, ``pd0``, …, which share one machine: its cores
        and a relative ``--kv-cache-memory`` are divided evenly."""
        roles = topology.roles
        num_processes = sum(self.engine.tensor_parallel_size.of(role) for role in roles)
        num_decoders = max(1, sum(role.has_decoder for role in roles))
        share = replace(
            self.engine,
            threads=self.engine.threads_per_process(num_processes),
            kv_cache_memory=self.engine.kv_cache_memory.divided_by(num_decoders),
        )
        lease = replace(self.lease, health_port=0)  # one port can't be that of several
        return [
            replace(self, engine=share, lease=lease).instance(role, name, join) for name, role in topology.names.items()
        ]
