"""What a supervisor writes to its frontend."""

import dataclasses
from pathlib import Path

import pytest

from triptych.config import ClusterConfig, EngineConfig, FrontendConfig, FrontendSpec, RankSizes, ServeConfig
from triptych.errors import ConfigError

SPEC = FrontendSpec(
    config=ServeConfig(
        model=Path("/models/a b"),
        engine=EngineConfig(tensor_parallel_size=RankSizes.parse("P=2,D=1")),
        cluster=ClusterConfig(cluster_secret_file="/etc/secret"),
        frontend=FrontendConfig.of(port=7, api_key=("a", "b"), request_timeout=1e9, control_port=3),
    ),
    expects_encoders=True,
    listener=5,
    supervisor=42,
)


def test_a_frontend_reads_what_its_supervisor_wrote() -> None:
    assert FrontendSpec.from_bytes(SPEC.to_bytes()) == SPEC
    assert isinstance(FrontendSpec.from_bytes(SPEC.to_bytes()).config.model, Path)


def test_anything_else_is_refused() -> None:
    written = SPEC.to_bytes()
    for broken in (b"", b"\xc1", written[:-1], written.replace(b"/models/a b", b"/models/a\xff")):
        with pytest.raises(ConfigError, match="spec can't be read"):
            FrontendSpec.from_bytes(broken)
    bad = dataclasses.replace(SPEC, config=dataclasses.replace(SPEC.config, model=Path("/\udcff")))
    with pytest.raises(ConfigError, match="paths must be UTF-8"):
        bad.to_bytes()
