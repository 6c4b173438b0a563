import argparse

import pytest

from triptych.cli.flags import add_settings, settings
from triptych.config import EngineConfig, FrontDoorConfig, LeaseConfig, as_flags, threads_per_instance
from triptych.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EngineConfig, {"dtype": "int4"}),
        (EngineConfig, {"page_size": 0}),
        (EngineConfig, {"threads": -1}),
        (EngineConfig, {"receive_blocks": 0}),
        (EngineConfig, {"max_model_len": 100, "kv_cache_tokens": 64}),
        (FrontDoorConfig, {"port": 65536}),
        (FrontDoorConfig, {"control_port": -1}),
        (FrontDoorConfig, {"max_queue": 0}),
        (FrontDoorConfig, {"max_images": -1}),
        (FrontDoorConfig, {"max_image_mb": 256}),
        (FrontDoorConfig, {"request_timeout": 0.0}),
        (LeaseConfig, {"heartbeat": 10.0, "lease_expiry": 10.0}),
        (LeaseConfig, {"heartbeat": 0.0}),
    ],
)
def test_settings_that_make_no_sense_are_named(config: type, values: dict[str, object]) -> None:
    name = next(iter(values)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name}"):
        config(**values)


def test_images_are_no_larger_than_messages() -> None:
    FrontDoorConfig(max_image_mb=255)
    with pytest.raises(ConfigError, match=r"--max-image-mb 4000 is too large: .* at most 255 MiB"):
        FrontDoorConfig(max_image_mb=4000)


def test_zero_means_unlimited_where_help_says_so() -> None:
    assert EngineConfig(threads=0, max_model_len=0, encode_cache_mb=0).max_context == 16384


def test_pages_cover_the_cache_and_bound_the_context() -> None:
    engine = EngineConfig(kv_cache_tokens=100, page_size=16, max_model_len=50)
    assert (engine.num_pages, engine.max_context) == (7, 50)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(dtype="bfloat16", page_size=8),
        FrontDoorConfig(host="::1", allowed_media_domains=("a.example", "b.example"), request_timeout=1.5),
        FrontDoorConfig(),
        LeaseConfig(heartbeat=0.25),
    ],
)
def test_settings_survive_the_command_line(config: object) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings(type(config), parser.parse_args(as_flags(config))) == config


def test_threads_are_shared_out_and_never_none() -> None:
    assert threads_per_instance(EngineConfig(threads=3), 100) == 3
    assert threads_per_instance(EngineConfig(), 10_000) == 1
