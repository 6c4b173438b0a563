"""Bounds of settings, one by one and together, for every group."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from triptych.config import (
    CONFIG_GROUPS,
    AdmissionConfig,
    AuthConfig,
    ClusterConfig,
    EncodeConfig,
    EngineConfig,
    FrontendConfig,
    HttpConfig,
    LeaseConfig,
    MediaConfig,
    MediaFetchConfig,
    ObserveConfig,
    Settings,
    TlsConfig,
    TransferConfig,
    names_of,
    setting,
)
from triptych.errors import ConfigError


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
        (EngineConfig, {"quantization": "int8", "dtype": "float32"}),
        (EncodeConfig, {"decode_timeout": 0.0}),
        (EncodeConfig, {"encode_cache_mb": -1}),
        (TransferConfig, {"fabric": "pigeon"}),
        (HttpConfig, {"port": 65536}),
        (HttpConfig, {"control_port": -1}),
        (HttpConfig, {"port": 65534, "frontends": 2}),
        (HttpConfig, {"control_port": 65534, "frontends": 3}),
        (HttpConfig, {"client_timeout": float("nan")}),
        (AdmissionConfig, {"max_queue": 0}),
        (AdmissionConfig, {"max_queue_per_client": 9, "max_queue": 8}),
        (AdmissionConfig, {"request_timeout": 0.0}),
        (AdmissionConfig, {"placement": "nearest"}),
        (MediaConfig, {"max_file_mb": 256}),
        (MediaConfig, {"max_image_pixels": 50_000_001}),
        (MediaFetchConfig, {"allowed_media_networks": ("10.0.0.1/8",)}),
        (AuthConfig, {}),
        (TlsConfig, {"ssl_certfile": "cert"}),
        (LeaseConfig, {"lease_expiry": 10.0, "heartbeat": 10.0}),
        (LeaseConfig, {"heartbeat": -1.0}),
        (ObserveConfig, {"log_level": "loud"}),
        (ObserveConfig, {"request_log_file": "x"}),
        (ObserveConfig, {"ui_trace_url": "http://host/{trace_id}"}),
        (ClusterConfig, {"cluster_host": "0.0.0.0", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "::", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "", "cluster_secret_file": "secret"}),
        (ClusterConfig, {"cluster_host": "10.0.0.1"}),
        (ClusterConfig, {"cluster_host": "node-1.example"}),
    ],
)
def test_settings_that_make_no_sense_are_named(config: type, values: dict[str, object]) -> None:
    config()
    if values:
        name = next(iter(values)).replace("_", "-")
        with pytest.raises(ConfigError, match=f"--{name}"):
            config(**values)


def observed(url: str) -> ObserveConfig:
    return ObserveConfig(otlp_traces_endpoint="http://host:4318/v1/traces", ui_trace_url=url)


@pytest.mark.parametrize(
    "url",
    [
        "http://host:16686/trace/{trace_id}", "https://[::1]/#{trace_id}",
        "https://grafana/explore?left={%22queries%22:[{%22query%22:%22{trace_id}%22}]}",
    ],
)  # fmt: skip
def test_traces_are_linked_to_by_urls_of_the_web(url: str) -> None:
    assert observed(url).ui_trace_url == url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("javascript:alert('{trace_id}')", "http:// or https://"),
        ("JavaScript://host/%0Aalert('{trace_id}')", "http:// or https://"),
        ("data:text/html,{trace_id}", "http:// or https://"),
        ("//host/{trace_id}", "http:// or https://"),
        ("/trace/{trace_id}", "http:// or https://"),
        ("http:///{trace_id}", "and a host"),
        ("http://[::1/{trace_id}", "and a host"),
        ("http://host:port/{trace_id}", "and a host"),
        ("http://host/{trace_id} ", "spaces or control characters"),
        ("http://host/\n{trace_id}", "spaces or control characters"),
        ("http://name:word@host/{trace_id}", "a user or a password"),
        ("http://{trace_id}/", "no {trace_id} after its host"),
        ("http://{trace_id}/{trace_id}", "no {trace_id} after its host"),
        ("http://host/{id}", "no {trace_id} after its host"),
    ],
)
def test_other_links_to_traces_are_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        observed(url)
    assert str(refused.value).startswith(f"--ui-trace-url {url!r} ")


def test_every_number_has_a_bound_that_is_checked() -> None:
    numbers = 0
    for group in CONFIG_GROUPS:
        for item in fields(group):
            if type(item.default) not in (int, float):
                continue
            numbers += 1
            least, above, most = (item.metadata[bound] for bound in ("ge", "gt", "le"))
            wrong = [above if least is None else least - 1, float("nan"), *([] if most is None else [most + 1])]
            for value in wrong:
                with pytest.raises(ConfigError, match=f"--{item.name.replace('_', '-')} {value} is too (small|large)"):
                    group(**{item.name: value})
    assert numbers > 30


def test_a_new_number_without_a_bound_is_refused() -> None:
    with pytest.raises(TypeError, match="a number needs ge or gt: cats at a time"):
        setting(3, "cats at a time")
    with pytest.raises(TypeError, match=r"Cats\.max_cats is not declared with setting\(\)"):

        @dataclass(frozen=True)
        class Cats(Settings):
            max_cats: int = 3


def test_bounds_and_choices_of_a_new_group_are_checked_without_further_code() -> None:
    @dataclass(frozen=True)
    class Cats(Settings):
        max_cats: int = setting(3, "cats at a time", ge=1, le=9)
        fur: str = setting("short", "length of the fur", choices=("short", "long"))

    Cats(max_cats=9, fur="long")
    for values, problem in (
        ({"max_cats": 0}, "--max-cats 0 is too small: at least 1"),
        ({"max_cats": 10}, "--max-cats 10 is too large: at most 9"),
        ({"fur": "none"}, "--fur none is not one of short, long"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Cats(**values)


def test_groups_are_documented_and_share_no_name() -> None:
    names = [name for group in CONFIG_GROUPS for item in fields(group) for name in names_of(item)]
    assert len(names) == len(set(names))
    for group in CONFIG_GROUPS:
        assert group.__doc__
        assert "\n" not in group.__doc__
        assert group.__doc__.endswith(".")


def test_zero_means_unlimited_where_help_says_so() -> None:
    EngineConfig(threads=0, max_model_len=0, kv_cache_tokens=0)
    EncodeConfig(encode_cache_mb=0)


def test_threads_are_shared_out_and_never_none() -> None:
    assert EngineConfig(threads=3).threads_per_process(100) == 3
    assert EngineConfig().threads_per_process(10_000) == 1


# ── the groups of a frontend together ────────────────────────────────────────────────────────────────────────


def test_settings_of_a_frontend_find_their_group() -> None:
    frontend = FrontendConfig.of(port=0, max_queue=7)
    assert frontend.having({"max_queue": 8}) == FrontendConfig(
        http=HttpConfig(port=0), admission=AdmissionConfig(max_queue=8)
    )
    with pytest.raises(TypeError, match="no group of the frontend's settings has max_cats"):
        FrontendConfig.of(max_cats=1)


def test_one_request_is_never_more_than_its_client_may_hold() -> None:
    FrontendConfig.of(max_body_mb=64, max_inflight_mb=256)
    FrontendConfig.of(max_body_mb=64, max_media_mb=16, max_inflight_mb=160)
    elsewhere: list[dict[str, Any]] = [
        {"allowed_media_domains": ("a.example",)},
        {"allowed_local_media_path": "/media"},
    ]
    for allowed in elsewhere:
        FrontendConfig.of(max_body_mb=64, max_media_mb=256, max_inflight_mb=640, **allowed)
        with pytest.raises(ConfigError, match=r"--max-inflight-mb 639 .* 320 MiB .*64, and 256 MiB"):
            FrontendConfig.of(max_body_mb=64, max_media_mb=256, max_inflight_mb=639, **allowed)
    with pytest.raises(ConfigError, match=r"--max-inflight-mb 255 .* 128 MiB .*64, and 64 MiB"):
        FrontendConfig.of(max_body_mb=64, max_inflight_mb=255)


# ── the cluster's secret ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert ClusterConfig(cluster_host=host).secret() is None


def test_a_secret_is_what_its_file_holds_without_the_last_line_end(tmp_path: Path) -> None:
    assert secret_of(tmp_path, b"0123456789abcdef\n") == secret_of(tmp_path, b"0123456789abcdef") == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"0123456789abcde\n", b" " * 100, b"x" * 5000])
def test_a_secret_too_short_or_too_long_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have 16 to 4096 bytes"):
        secret_of(tmp_path, content)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o700 | 0o001])
def test_a_secret_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="others can use it"):
        secret_of(tmp_path, b"0123456789abcdef", mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize(
    ("mode", "owner", "is_read"),
    [(0o440, 0, True), (0o640, 0, True), (0o460, 0, False), (0o444, 0, False), (0o440, 65534, False)],
)
def test_a_secret_that_root_lets_a_group_read(mode: int, owner: int, is_read: bool, tmp_path: Path) -> None:
    """As systemd, for which the mode is a list's of users, Kubernetes with ``fsGroup``, and groups for TLS keys do."""
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef")
    os.chown(file, owner, 65534)
    file.chmod(mode)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    script = """if True:
        import os, sys
        from triptych.config import ClusterConfig
        from triptych.errors import ConfigError
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            print(ClusterConfig(cluster_secret_file=sys.argv[1]).secret())
        except ConfigError as error:
            print(error)
    """
    found = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    assert ("others can use it" in found.stdout) is not is_read
    assert ("0123456789abcdef" in found.stdout) is is_read


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"--cluster-secret-file {path} can't be read: "):
            ClusterConfig(cluster_secret_file=str(path)).secret()


def secret_of(folder: Path, content: bytes, mode: int = 0o600) -> bytes | None:
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return ClusterConfig(cluster_secret_file=str(file)).secret()
