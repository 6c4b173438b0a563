"""The spec of an instance: it survives serialization, and it divides a machine among a topology."""

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.config import (
    CacheFolder,
    ClusterConfig,
    CpuSet,
    EncodeConfig,
    EngineConfig,
    FrontendConfig,
    InstanceSpec,
    LeaseConfig,
    MemorySize,
    ObserveConfig,
    RankSizes,
    ServeConfig,
    TransferConfig,
)
from triptych.config.pool import PoolAddress
from triptych.errors import ConfigError
from triptych.topology import Role, Topology

CONFIG = ServeConfig(
    model=Path("/models/m"),
    engine=EngineConfig(
        dtype="bfloat16",
        threads=3,
        cpus=CpuSet.parse("0-2,7"),
        tensor_parallel_size=RankSizes.parse("P=2,D=1"),
        kv_cache_memory=MemorySize.parse("30%"),
        enable_prefix_caching=False,
    ),
    encode=EncodeConfig(
        decode_timeout=1.5,
        encode_cache_disk=CacheFolder.parse("/var/rows,1GiB"),
        embedding_store=PoolAddress.parse("mooncake://[::1]:50051,1GiB"),
    ),
    transfer=TransferConfig(inject_faults="drop=0.5"),
    cluster=ClusterConfig(cluster_host="fd00::1", cluster_secret_file="/run/secrets/cluster"),
    frontend=FrontendConfig.of(api_key=("hidden",)),
    lease=LeaseConfig(heartbeat=0.25),
    observe=ObserveConfig(log_level="debug"),
)


def test_a_spec_survives_serialization_and_holds_no_api_key() -> None:
    spec = replace(CONFIG.instance(Role.P, "p0", "10.0.0.1:8001"), supervisor=42)
    assert InstanceSpec.from_bytes(spec.to_bytes()) == spec
    assert spec.num_ranks == 2
    assert b"hidden" not in spec.to_bytes()


def test_infinite_settings_survive_serialization() -> None:
    lease = LeaseConfig(start_timeout=float("inf"), drain_timeout=float("inf"))
    spec = replace(CONFIG, lease=lease).instance(Role.P, "p0", "10.0.0.1:8001")
    assert InstanceSpec.from_bytes(spec.to_bytes()).lease == lease


def test_a_path_that_is_not_utf_8_is_refused() -> None:
    spec = replace(CONFIG, model=Path("/models/caf\udce9")).instance(Role.P, "p0", "10.0.0.1:8001")
    with pytest.raises(ConfigError, match=r"paths must be UTF-8: '/models/caf\\udce9'"):
        spec.to_bytes()


def test_a_spec_is_checked_when_it_is_read() -> None:
    written = CONFIG.instance(Role.P, "p0", "10.0.0.1:8001").to_bytes()
    with pytest.raises(ConfigError, match="--page-size 0 is too small"):
        InstanceSpec.from_bytes(written.replace(b"page_size\x10", b"page_size\x00"))
    with pytest.raises(ConfigError, match="can't be read"):
        InstanceSpec.from_bytes(written[:-1])


def test_a_topology_divides_one_machine() -> None:
    config = replace(CONFIG, engine=replace(CONFIG.engine, threads=0))
    specs = config.instances(Topology.parse("2E1P2D"), "127.0.0.1:1")
    assert [(spec.name, spec.role) for spec in specs] == [
        ("e0", Role.E), ("e1", Role.E), ("p0", Role.P), ("d0", Role.D), ("d1", Role.D)
    ]  # fmt: skip
    assert {str(spec.engine.kv_cache_memory) for spec in specs} == {"10%"}
    assert {spec.engine.threads for spec in specs} == {EngineConfig().threads_per_process(6)}
    amount = replace(CONFIG, engine=replace(CONFIG.engine, kv_cache_memory=MemorySize.parse("1GiB")))
    assert {spec.engine.kv_cache_memory for spec in amount.instances(Topology.parse("2PD"), "a:1")} == {
        MemorySize(2**30)
    }
    assert {spec.engine.threads for spec in amount.instances(Topology.parse("2PD"), "a:1")} == {3}
