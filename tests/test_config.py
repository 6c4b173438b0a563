import argparse
import logging
from pathlib import Path
from typing import Any

import pytest

from triptych.cli.flags import add_settings, settings
from triptych.config import (
    ClusterConfig,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    as_flags,
    kv_cache_memory_per_instance,
    parse_cpus,
    parse_memory,
    processes_of,
    threads_per_process,
)
from triptych.errors import ConfigError
from triptych.topology import Role


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EngineConfig, {"dtype": "int4"}),
        (EngineConfig, {"kv_cache_dtype": "fp8"}),
        (EngineConfig, {"device": "tpu"}),
        (EngineConfig, {"device": "cuda:"}),
        (EngineConfig, {"page_size": 0}),
        (EngineConfig, {"threads": -1}),
        (EngineConfig, {"receive_blocks": 0}),
        (EngineConfig, {"max_model_len": 100, "kv_cache_tokens": 64}),
        (FrontendConfig, {"port": 65536}),
        (FrontendConfig, {"control_port": -1}),
        (FrontendConfig, {"max_queue": 0}),
        *[
            (FrontendConfig, {"limit_mm_per_prompt": text})
            for text in (
                "",
                "image",
                "image=",
                "image=-1",
                "image=1.5",
                "image=1,image=2",
                "images=3",
                "image=3 video=2",
                "image=1,",
                "text=1",
                "9",
                '{"image": 1',
                '{"image": "x"}',
                '{"image": true}',
                '{"image": null}',
                '{"picture": 1}',
                '{"image": 1, "image": 2}',
                '{"image": {"count": 1, "width": 5}}',
                '{"image": [1]}',
                '{"image": {"count": {"count": 1}}}',
                "{" * 9000,
                "image=" + "9" * 7,
            )
        ],
        (FrontendConfig, {"max_image_mb": 256}),
        (FrontendConfig, {"request_timeout": 0.0}),
        (LeaseConfig, {"heartbeat": 10.0, "lease_expiry": 10.0}),
        (LeaseConfig, {"heartbeat": 0.0}),
        (ClusterConfig, {"cluster_host": "0.0.0.0", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "::", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "10.0.0.1"}),
        (ClusterConfig, {"cluster_host": "node-1.example"}),
    ],
)
def test_settings_that_make_no_sense_are_named(config: type, values: dict[str, object]) -> None:
    name = next(iter(values)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name}"):
        config(**values)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("image=3", {"image": 3, "video": 4, "audio": 16}),
        (" image = 3 , video=0", {"image": 3, "video": 0, "audio": 16}),
        ('{"video": 7}', {"image": 64, "video": 7, "audio": 16}),
        (' {"image": {"count": 2}, "audio": 1}', {"image": 2, "video": 4, "audio": 1}),
        ("{}", {"image": 64, "video": 4, "audio": 16}),
    ],
)
def test_limits_of_media_in_both_spellings(text: str, limits: dict[str, int]) -> None:
    assert FrontendConfig(limit_mm_per_prompt=text).media_limits == limits
    parser = argparse.ArgumentParser()
    add_settings(parser)
    given = parser.parse_args(["--limit-mm-per-prompt", text])
    assert settings(FrontendConfig, given).media_limits == limits


def test_one_request_is_never_more_than_its_client_may_hold() -> None:
    FrontendConfig(max_body_mb=64, max_inflight_mb=256)
    FrontendConfig(max_body_mb=64, max_media_mb=16, max_inflight_mb=160)
    elsewhere: list[dict[str, Any]] = [
        {"allowed_media_domains": ("a.example",)},
        {"allowed_local_media_path": "/media"},
    ]
    for allowed in elsewhere:
        FrontendConfig(max_body_mb=64, max_media_mb=256, max_inflight_mb=640, **allowed)
        with pytest.raises(ConfigError, match=r"--max-inflight-mb 639 .* 320 MiB .*64, and 256 MiB"):
            FrontendConfig(max_body_mb=64, max_media_mb=256, max_inflight_mb=639, **allowed)
    with pytest.raises(ConfigError, match=r"--max-inflight-mb 255 .* 128 MiB .*64, and 64 MiB"):
        FrontendConfig(max_body_mb=64, max_inflight_mb=255)


def test_images_are_no_larger_than_messages() -> None:
    FrontendConfig(max_image_mb=255)
    with pytest.raises(ConfigError, match=r"--max-image-mb 4000 is too large: .* at most 255 MiB"):
        FrontendConfig(max_image_mb=4000)


def test_zero_means_unlimited_where_help_says_so() -> None:
    EngineConfig(threads=0, max_model_len=0, kv_cache_tokens=0, encode_cache_mb=0)


@pytest.mark.parametrize(
    ("text", "amount"), [("8GiB", 8 * 2**30), ("1.5 gb", 1_500_000_000), ("25%", 0.25), ("100%", 1.0), ("2kib", 2048)]
)
def test_memory_is_an_amount_or_a_share(text: str, amount: float) -> None:
    found = parse_memory(text, "--kv-cache-memory")
    assert found == amount
    assert type(found) is type(amount)


@pytest.mark.parametrize("text", ["", "8", "8G", "-1GiB", "0%", "0MiB", "101%", "lots", "1e9MB", "nan%", "٣GiB"])
def test_memory_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        EngineConfig(kv_cache_memory=text)


@pytest.mark.parametrize(("text", "cores"), [("", set()), ("0", {0}), ("0-2, 5", {0, 1, 2, 5}), ("7-7", {7})])
def test_cores_are_named_as_for_taskset(text: str, cores: set[int]) -> None:
    assert parse_cpus(text) == cores


@pytest.mark.parametrize("text", ["a", "3-1", "0,,1", "-1", "0-", "99999", "٣"])
def test_cores_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        EngineConfig(cpus=text)


def test_language_instances_divide_a_share_but_not_an_amount() -> None:
    assert kv_cache_memory_per_instance(EngineConfig(kv_cache_memory="30%"), 3) == "10%"
    assert kv_cache_memory_per_instance(EngineConfig(kv_cache_memory="1GiB"), 3) == "1GiB"


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(dtype="bfloat16", page_size=8, tensor_parallel_size="P=2,D=1"),
        FrontendConfig(host="::1", allowed_media_domains=("a.example", "b.example"), request_timeout=1.5),
        FrontendConfig(),
        LeaseConfig(heartbeat=0.25),
        ClusterConfig(cluster_host="fd00::1", cluster_secret_file="/run/secrets/cluster"),
    ],
)
def test_settings_survive_the_command_line(config: object) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings(type(config), parser.parse_args(as_flags(config))) == config


def test_threads_are_shared_out_and_never_none() -> None:
    assert threads_per_process(EngineConfig(threads=3), 100) == 3
    assert threads_per_process(EngineConfig(), 10_000) == 1


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("3", {"P": 3, "D": 3, "EP": 3, "PD": 3, "EPD": 3}),
        ("P=2,D=4", {"P": 2, "D": 4}),
        (" pd = 8 ", {"PD": 8}),
    ],
)
def test_only_instances_that_have_a_decoder_are_several_processes(text: str, sizes: dict[str, int]) -> None:
    engine = EngineConfig(tensor_parallel_size=text)
    assert [processes_of(engine, role) for role in Role] == [sizes.get(role, 1) for role in Role]


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "99999", "E=2", "P=2,P=2", "P=0", "P=", "P", "D=2,", "2,D=1", "٣"]
)
def test_numbers_of_processes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        EngineConfig(tensor_parallel_size=text)


# ── the cluster's secret ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert ClusterConfig(cluster_host=host).secret() is None


def test_a_secret_is_what_its_file_says_without_the_last_line_end(tmp_path: Path) -> None:
    assert secret_of(tmp_path, b"0123456789abcdef\n") == secret_of(tmp_path, b"0123456789abcdef") == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"0123456789abcde\n", b" " * 100, b"x" * 5000])
def test_a_secret_too_short_or_too_long_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have 16 to 4096 bytes"):
        secret_of(tmp_path, content)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o700 | 0o001])
def test_a_secret_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="others can use it"):
        secret_of(tmp_path, b"0123456789abcdef", mode)


def test_a_secret_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"--cluster-secret-file {path} can't be read: "):
            ClusterConfig(cluster_secret_file=str(path)).secret()


def secret_of(folder: Path, content: bytes, mode: int = 0o600) -> bytes | None:
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return ClusterConfig(cluster_secret_file=str(file)).secret()


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_kubernetes_says_of_a_service_of_that_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("PORT", "tcp://10.96.0.7:8000"),
        ("PORT_8000_TCP_ADDR", "10.96.0.7"),
        ("SERVICE_PORT", "8000"),
        ("CONTROL_PORT", "tcp://10.96.0.8:8001"),
        ("MAX_QUEUE", "7"),
    ):
        monkeypatch.setenv(f"TRIPTYCH_{name}", value)
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings(FrontendConfig, parser.parse_args([])) == FrontendConfig(max_queue=7)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "TRIPTYCH_PORT=tcp://10.96.0.7:8000" in caplog.text
