"""Flags, environment and defaults; what is refused before anything starts."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.exits import exit_code
from triptych import exit_codes
from triptych.cli import fitting, flags, serve
from triptych.config import (
    CONFIG_GROUPS,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    public_fields,
)
from triptych.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", sharded=True)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in CONFIG_GROUPS:
        for item in public_fields(group):
            monkeypatch.delenv(f"TRIPTYCH_{item.name.upper()}", raising=False)


NOT_ALONE = (
    "engine_key_file",
    "lease_expiry",
    "ssl_certfile",
    "ssl_keyfile",
    "request_log_file",
    "max_queue_per_client",
    "ui_trace_url",
)
"""Settings that another one has to go with."""


def parsed(*arguments: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command says that can't start: one line, or the last one if a child process has said more."""
    assert exit_code(arguments) in (exit_codes.CONFIG, exit_codes.FAILED)
    said = capsys.readouterr()
    *relayed, line = (said.out + said.err).splitlines()
    assert all(one.startswith("[") for one in relayed)
    assert line.startswith("triptych: ")
    return line


def test_defaults(folder: Path) -> None:
    config = flags.serve_config(parsed(folder))
    assert (config.engine, config.frontend, config.lease) == (EngineConfig(), FrontendConfig(), LeaseConfig())
    assert config.model == folder
    assert flags.model_name(parsed(folder), config) == "tiny"


def test_every_setting_has_a_flag_and_a_variable_and_the_flag_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "device": "cuda:1",
        "dtype": "float32",
        "quantization": "none",
        "encoder_quantization": "int8",
        "kv_cache_dtype": "bfloat16",
        "tensor_parallel_size": "P=2,D=1",
        "kv_cache_memory": "1GiB",
        "limit_mm_per_prompt": "image=3",
        "cpus": "0-1",
        "host": "::1",
        "served_model_name": "x",
        "client_header": "x-team",
        "reasoning_parser": "qwen3",
        "response_store": "/srv/responses.db",
        "tool_call_parser": "hermes",
        "allowed_media_domains": "a.org, b.org",
        "allowed_media_networks": "10.0.0.0/8, fd00::/64",
        "api_key": "one, two",
        "api_key_file": "/srv/keys",
        "allowed_origins": "https://a.org, https://b.org",
        "allowed_hosts": "a.org, b.org",
        "allowed_local_media_path": "/srv/media",
        "max_image_pixels": "7",
        "embedding_store": "mooncake://127.0.0.1:50051",
        "record": "/srv/asked.jsonl",
        "engine": "vllm=http://127.0.0.1:8001",
        "fabric": "shm",
        "checksum": "always",
        "placement": "round-robin",
        "encode_cache_disk": "/srv/rows,2GiB",
        "restart": "never",
        "mooncake_protocol": "rdma",
        "mooncake_devices": "mlx5_0",
        "cluster_host": "127.0.0.2",
        "cluster_secret_file": "/srv/secret",
        "log_level": "debug",
        "log_format": "json",
        "otlp_traces_endpoint": "http://localhost:4318/v1/traces",
    }
    for group in CONFIG_GROUPS:
        for item in public_fields(group):
            default: Any = item.default
            if isinstance(default, bool) or item.name in NOT_ALONE:
                continue
            value = given.get(item.name) or str(default + 1)
            several, parse = isinstance(default, tuple), item.metadata["parse"] or type(default)
            expected = tuple(value.split(", ")) if several else parse(value)
            monkeypatch.setenv(f"TRIPTYCH_{item.name.upper()}", value)
            from_variable = flags.settings(group, parsed(folder))
            assert getattr(from_variable, item.name) == expected
            monkeypatch.setenv(f"TRIPTYCH_{item.name.upper()}", "no value at all")
            from_flag = flags.settings(group, parsed(folder, "--" + item.name.replace("_", "-"), value))
            assert getattr(from_flag, item.name) == expected
            monkeypatch.delenv(f"TRIPTYCH_{item.name.upper()}")


def test_a_switch_is_two_flags_and_a_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reuses(*arguments: str) -> bool:
        return flags.settings(EngineConfig, parsed(folder, *arguments)).enable_prefix_caching

    assert reuses()
    assert not reuses("--no-enable-prefix-caching")
    monkeypatch.setenv("TRIPTYCH_ENABLE_PREFIX_CACHING", "off")
    assert not reuses()
    assert reuses("--enable-prefix-caching")
    monkeypatch.setenv("TRIPTYCH_ENABLE_PREFIX_CACHING", "maybe")
    with pytest.raises(ConfigError, match="TRIPTYCH_ENABLE_PREFIX_CACHING 'maybe'"):
        reuses()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "http"], "--port 'http' is not a whole number"),
        (["--port", "65536"], "--port 65536 is too large: at most 65535"),
        (["--threads", "-1"], "--threads -1 is too small"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 is too small"),
        (["--request-timeout", "nan"], "--request-timeout 'nan' is not a number"),
        (["--dtype", "int3"], "--dtype int3 is not one of auto, float32"),
        (["--lease-expiry", "0"], "--lease-expiry 0.0 is too small"),
        (["--max-model-len", "999", "--kv-cache-tokens", "99"], "doesn't fit in --kv-cache-tokens 99"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory 'lots' is neither"),
        (["--topology", "1E"], "no instance that decodes"),
        (["--topology", "1E1D"], "has no prefill instance for its decode instances"),
        (["--topology", "1E1X"], "not a sequence of counts and roles"),
        (["--topology", "0E1PD"], "zero instances"),
        (["--topology", "99E1PD"], "more than"),
        (["--topology", "1E1DP"], "'DP' is not a role"),
        (["--role", "X"], "--role X is not one of E, P, D, EP, PD, EPD, frontend"),
        (["--role", "E"], "--role E needs --join HOST:PORT"),
        (["--role", "E", "--join", "nowhere"], "--join 'nowhere' is not HOST:PORT"),
        (["--role", "E", "--join", "tcp://127.0.0.1:1"], "is not HOST:PORT"),
        (["--role", "E", "--join", "127.0.0.1:1,nowhere"], "--join 'nowhere' is not HOST:PORT"),
        (["--role", "E", "--join", "127.0.0.1:1,"], "--join '' is not HOST:PORT"),
        (["--role", "E", "--join", "127.0.0.1:1,localhost:2,127.0.0.1:1"], "--join names 127.0.0.1:1 twice"),
        (["--join", "127.0.0.1:1"], "--join is for --role and an instance"),
        (["--host", "no.such.host.invalid"], "can't listen on 'no.such.host.invalid'"),
    ],
)
def test_settings_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, "serve", folder, *arguments)


def test_a_variable_that_makes_no_sense_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_QUEUE", "many")
    assert "TRIPTYCH_MAX_QUEUE 'many' is not a whole number" in refused(capsys, "serve", folder)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-num-seq", "8"], "there is no --max-num-seq; did you mean --max-num-seqs?"),
        (["--max-num"], "there is no --max-num (see"),
        (["--max-num-seq", "many"], "there is no --max-num-seq (see"),
        (["--max-num-seq"], "there is no --max-num-seq (see"),
        (["--log-formats", "jason"], "there is no --log-formats (see"),
        (["--enable-log-request"], "there is no --enable-log-request; did you mean --enable-log-requests?"),
        (["--enable-log-request=1"], "there is no --enable-log-request (see"),
        (["--max_num_seq=8"], "there is no --max-num-seq; did you mean --max-num-seqs?"),
        (["-t4"], "there is no -t4"),
        (["--zzz", "1", "--seed", "2", "-hf"], "there is no --zzz; there is no --seed: requests have"),
        (["--trust-remote-code"], "no code of a checkpoint is ever run"),
        (["--gpu-memory-utilization=0.9"], "there is no --gpu-memory-utilization: use --kv-cache-memory"),
        (["--zzz"], "there is no --zzz (see triptych serve --help)\n"),
        (["and", "more"], "unexpected argument 'and'"),
    ],
)
def test_a_flag_that_is_not_here_is_named_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    assert exit_code(["serve", "demo", *given]) == 2
    assert says in capsys.readouterr().err


def test_names_of_vllm_mean_the_same_and_two_names_of_one_setting_may_not_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flags.settings(EngineConfig, parsed(folder, "--block-size", "32")).page_size == 32
    assert flags.settings(LeaseConfig, parsed(folder, "--shutdown-timeout", "7")).drain_timeout == 7
    both = parsed(folder, "--shutdown-timeout", "7", "--drain-timeout", "8")
    with pytest.raises(ConfigError, match="--drain-timeout 8 and --shutdown-timeout 7 are one setting"):
        flags.settings(LeaseConfig, both)
    assert flags.settings(EngineConfig, parsed(folder, "--block-size", "8", "--page-size", "8")).page_size == 8
    monkeypatch.setenv("TRIPTYCH_SHUTDOWN_TIMEOUT", "9")
    assert flags.settings(LeaseConfig, parsed(folder)).drain_timeout == 9


def test_a_variable_that_is_no_setting_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_NUM_SEQ", "8")
    said = refused(capsys, "serve", folder)
    assert "TRIPTYCH_MAX_NUM_SEQ=8 is no setting; did you mean TRIPTYCH_MAX_NUM_SEQS?" in said


# ── defaults by device ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "build", "expected"),
    [
        ("", "2.13.0", (128, 8192, "70%", 8192)),
        ("--device cpu", "2.13.0", (32, 512, "25%", 1024)),
        ("", "2.13.0+cpu", (32, 512, "25%", 1024)),
        ("--max-num-seqs 32 --kv-cache-memory 8GiB", "2.13.0", (32, 8192, "8GiB", 8192)),
    ],
)
def test_defaults_follow_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, build: str, expected: tuple[int, int, str, int]
) -> None:
    """On a machine whose driver has made the device file of a GPU, with one build of PyTorch."""
    monkeypatch.setattr(fitting, "GPUS", ("null",))
    monkeypatch.setattr(fitting, "version", lambda _: build)
    config = flags.serve_config(parsed(folder, *given.split()))
    engine = config.engine
    found = engine.max_num_seqs, engine.max_num_batched_tokens, str(engine.kv_cache_memory)
    assert (*found, config.encode.encode_batch_patches) == expected
