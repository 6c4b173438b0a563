"""Flags, environment and defaults; what is refused before anything starts."""

import argparse
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.tiny import make_tiny
from triptych import exit_codes
from triptych.checkpoint.safetensors_header import read_folder
from triptych.cli import flags, main, serve
from triptych.config import (
    CONFIG_GROUPS,
    RENAMED_SETTINGS,
    AdmissionConfig,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    MemorySize,
)
from triptych.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", sharded=True)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in CONFIG_GROUPS:
        for item in fields(group):
            monkeypatch.delenv(f"TRIPTYCH_{item.name.upper()}", raising=False)


NOT_ALONE = (
    "lease_expiry",
    "ssl_certfile",
    "ssl_keyfile",
    "request_log_file",
    "max_queue_per_client",
    "own_port",
    "ui_trace_url",
)
"""Settings that another one has to go with."""


def parsed(*arguments: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command says that can't start: one line, or the last one if a child process has said more."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code in (exit_codes.CONFIG, exit_codes.FAILED)
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
        "allowed_methods": "GET, PUT",
        "allowed_headers": "a, b",
        "allowed_local_media_path": "/srv/media",
        "max_image_pixels": "7",
        "fabric": "shm",
        "checksum": "always",
        "placement": "round-robin",
        "restart": "never",
        "mooncake_protocol": "rdma",
        "mooncake_devices": "mlx5_0",
        "inject_faults": "drop=0.5",
        "cluster_host": "127.0.0.2",
        "cluster_secret_file": "/srv/secret",
        "log_level": "debug",
        "log_format": "json",
        "otlp_traces_endpoint": "http://localhost:4318/v1/traces",
    }
    for group in CONFIG_GROUPS:
        for item in fields(group):
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
        (["--heartbeat", "20"], "--heartbeat 20.0 must be shorter"),
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
        (["--max-num"], "there is no --max-num"),
        (["--trust-remote-code"], "no code of a checkpoint is ever run"),
        (["--gpu-memory-utilization=0.9"], "there is no --gpu-memory-utilization: use --kv-cache-memory"),
        (["--zzz"], "there is no --zzz (see triptych serve --help)\n"),
        (["and", "more"], "unexpected argument 'and'"),
    ],
)
def test_a_flag_that_is_not_here_is_named_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", *given])
    assert ended.value.code == 2
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


# ── names of before ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_a_former_name_is_refused_with_the_new_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    assert new in flags.known_names()
    assert old not in flags.known_names()
    with pytest.raises(SystemExit):
        main(["serve", "demo", f"--{old.replace('_', '-')}", "1"])
    said = capsys.readouterr().err
    assert f"there is no --{old.replace('_', '-')}: it is called --{new.replace('_', '-')} now" in said
    path = folder / "renamed.toml"
    path.write_text(f"{old} = 1\n")
    assert f": it is called {new.replace('_', '-')} now" in refused(capsys, "serve", folder, "--config", path)
    monkeypatch.setenv(f"TRIPTYCH_{old.upper()}", "1")
    assert f": it is called TRIPTYCH_{new.upper()} now" in refused(capsys, "serve", folder)


def test_the_former_name_of_the_frontend_is_refused_with_the_new_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "triptych.toml"
    path.write_text("role = 'front-door'\n")
    for arguments in (["--role", "front-door"], ["--config", path]):
        assert "--role front-door is called frontend now" in refused(capsys, "serve", folder, *arguments)


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_variables_that_kubernetes_sets_for_a_service_of_that_name_are_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("PORT", "tcp://10.96.0.7:8000"),
        ("PORT_8000_TCP_ADDR", "10.96.0.7"),
        ("SERVICE_PORT", "8000"),
        ("CONTROL_PORT", "tcp://10.96.0.8:8001"),
        ("MAX_QUEUE", "7"),
    ):
        monkeypatch.setenv(f"TRIPTYCH_{name}", value)
    assert flags.frontend_settings(parsed(folder)) == FrontendConfig(admission=AdmissionConfig(max_queue=7))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "TRIPTYCH_PORT=tcp://10.96.0.7:8000" in caplog.text


class TestFile:
    """Of ``--config``."""

    def write(self, folder: Path, text: str) -> Path:
        path = folder / "triptych.toml"
        path.write_text(text)
        return path

    def test_flags_win_over_variables_over_the_file_over_defaults(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.write(
            tmp_path,
            "max-num-seqs = 1\nmax_queue = 2\nrequest-timeout = 3\nkv-cache-memory = '4GiB'\n"
            "enable-prefix-caching = false\nallowed-media-domains = ['a.org', 'b.org']\nshutdown-timeout = 5.5\n",
        )
        monkeypatch.setenv("TRIPTYCH_MAX_QUEUE", "20")
        monkeypatch.setenv("TRIPTYCH_REQUEST_TIMEOUT", "30")
        config = flags.serve_config(parsed(folder, "--config", path, "--request-timeout", "300"))
        assert (config.engine.max_num_seqs, config.frontend.admission.max_queue) == (1, 20)
        assert config.frontend.admission.request_timeout == 300.0
        assert config.engine.kv_cache_memory == MemorySize(4 * 2**30)
        assert config.engine.enable_prefix_caching is False
        assert config.frontend.fetch.allowed_media_domains == ("a.org", "b.org")
        assert config.lease.drain_timeout == 5.5
        assert config.engine.page_size == EngineConfig().page_size

    def test_the_file_may_name_model_and_topology(self, folder: Path, tmp_path: Path) -> None:
        path = self.write(tmp_path, f"model = {str(folder)!r}\ntopology = '1EPD'\n")
        arguments = parsed("--config", path)
        flags.fill_in_start(arguments)
        assert (arguments.model, arguments.topology) == (str(folder), "1EPD")
        arguments = parsed("--config", path, "--role", "E")
        flags.fill_in_start(arguments)
        assert (arguments.role, arguments.topology) == ("E", None)
        with pytest.raises(ConfigError, match="MODEL is missing"):
            flags.fill_in_start(parsed())

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("max-num-seq = 8", "max-num-seq = 8 is no setting; did you mean max-num-seqs?"),
            ("max-num-seqs = 'many'", "max-num-seqs 'many' is not a whole number"),
            ("max-num-seqs = 1.5", "max-num-seqs 1.5 is not a whole number"),
            ("max-num-seqs = true", "max-num-seqs True is not a whole number"),
            ("dtype = 3", "dtype 3 is not text"),
            ("enable-prefix-caching = 'maybe'", "enable-prefix-caching 'maybe' is not one of"),
            ("trust-remote-code = true", "no code of a checkpoint is ever run"),
            ("max_queue = 1\nmax-queue = 2", "max-queue is there twice: 1 and 2"),
            ("[engine]\nmax_queue = 1", "engine = {'max_queue': 1} is no setting"),
            ("drain-timeout = 1\nshutdown-timeout = 2", "shutdown-timeout 2 are one setting"),
            ("role = 'E'\ntopology = '1EPD'", "role 'E' and topology '1EPD' exclude each other"),
            ("quantization = 'int8'\ndtype = 'float32'", "int8 and --dtype float32 exclude each other"),
            ("max-queue = ", "Invalid value"),
            ("\0", "triptych.toml: "),
        ],
    )
    def test_what_makes_no_sense_in_it_is_named(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
    ) -> None:
        assert says in refused(capsys, "serve", folder, "--config", self.write(tmp_path, text))

    def test_one_that_is_not_there(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "No such file" in refused(capsys, "serve", folder, "--config", tmp_path / "none.toml")


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in refused(capsys, "serve", tmp_path / "nowhere")
    assert str(tmp_path) in refused(capsys, "serve", tmp_path)
    (tmp_path / "params.json").write_text("{}")
    assert "Mistral's own format" in refused(capsys, "serve", tmp_path)
    for name in ("config.json", "tokenizer.json"):
        broken = make_checkpoint(tmp_path / f"without {name}")
        (broken / name).unlink()
        assert name in refused(capsys, "serve", broken, "--port", "0")
    assert "no-picture.png" in refused(capsys, "run", folder, tmp_path / "no-picture.png", "What is it?")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "demo", "Why?", "--temperature", "nan"], 2, "argument --temperature: invalid number value: 'nan'"),
        (["run", "demo", "Why?", "--temperature", "1e999"], 2, "argument --temperature: invalid number value: '1e999'"),
        (["demo", "--questions", "-3"], 78, "--questions -3 is too small"),
        (["bench", "transfer", "--out", "/proc/x"], 1, "--out /proc/x: No such file or directory"),
        (["bench", "transfer", "--out", __file__], 1, f"--out {__file__}: File exists"),
    ],
)
def test_arguments_of_other_commands_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_doctor_adds_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(folder)])
    assert ended.value.code == 0
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        if match := re.search(r"(E|PD|EPD) +│ +([\d,]+) +│ +([\d,]+) +│ +([\d,]+)", line):
            rows[match[1]] = [int(number.replace(",", "")) for number in match.groups()[1:]]
    in_files = sum(info.num_bytes for info in read_folder(folder).values())
    assert rows["EPD"][2] == in_files
    assert rows["E"] == [rows["EPD"][0], 0, rows["EPD"][0]]
    assert rows["PD"] == [0, rows["EPD"][1], rows["EPD"][1]]
    assert min(rows["EPD"]) > 0


def test_the_default_topology_is_the_models(folder: Path, tmp_path: Path) -> None:
    text = make_tiny(tmp_path / "text", "qwen2")
    for model, expected in ((folder, "1E1PD"), (text, "1PD")):
        arguments = parsed(model)
        assert str(flags.topology(arguments, flags.serve_config(arguments), "1E1PD")) == expected
    asked = parsed(text, "--topology", "1P1D")
    assert str(flags.topology(asked, flags.serve_config(asked), "1E1PD")) == "1P1D"


def test_ranks_for_a_role_outside_the_topology_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve", "demo", "--topology", "1E1PD", "--tensor-parallel-size", "P=2")
    assert "names P, but the topology has E, PD" in said
