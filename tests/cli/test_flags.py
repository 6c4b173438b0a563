"""Flags, environment and defaults; what is refused before anything starts."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.tiny import make_tiny
from triptych.cli import flags, main, serve
from triptych.config import EngineConfig, FrontDoorConfig, LeaseConfig, as_flags
from triptych.errors import ConfigError
from triptych.models.safetensors_header import read_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", sharded=True)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (EngineConfig, FrontDoorConfig, LeaseConfig):
        for item in fields(config):
            monkeypatch.delenv(f"TRIPTYCH_{item.name.upper()}", raising=False)


def parsed(*arguments: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command says that can't start: one line."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 1
    said = capsys.readouterr()
    (line,) = (said.out + said.err).splitlines()
    assert line.startswith("triptych: ")
    return line


def test_defaults(folder: Path) -> None:
    config = flags.serve_config(parsed(folder))
    assert (config.engine, config.front_door, config.lease) == (EngineConfig(), FrontDoorConfig(), LeaseConfig())
    assert config.model == folder
    assert flags.model_name(parsed(folder), config) == "tiny"


def test_every_setting_has_a_flag_and_a_variable_and_the_flag_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "device": "cuda:1",
        "dtype": "float32",
        "quantization": "none",
        "tensor_parallel_size": "P=2,D=1",
        "kv_memory": "1GiB",
        "cpus": "0-1",
        "host": "::1",
        "served_model_name": "x",
        "allowed_media_domains": "a.org, b.org",
        "allowed_media_networks": "10.0.0.0/8, fd00::/64",
        "max_image_pixels": "1000",
        "api_key": "one, two",
        "api_key_file": "/srv/keys",
        "allowed_origins": "https://a.org, https://b.org",
        "allowed_methods": "GET, PUT",
        "allowed_headers": "a, b",
        "allowed_local_media_path": "/srv/media",
    }
    for config in (EngineConfig, FrontDoorConfig, LeaseConfig):
        for item in fields(config):
            if item.name in ("lease_expiry", "ssl_certfile", "ssl_keyfile"):
                continue  # no shorter than the heartbeat: below; and not one without the other
            value = given.get(item.name) or str(item.default + 1)
            if isinstance(item.default, bool):
                continue  # a flag without a value: below
            several = isinstance(item.default, tuple)
            expected = tuple(value.split(", ")) if several else type(item.default)(value)
            monkeypatch.setenv(f"TRIPTYCH_{item.name.upper()}", value)
            from_variable = flags.settings(config, parsed(folder))
            assert getattr(from_variable, item.name) == expected
            monkeypatch.setenv(f"TRIPTYCH_{item.name.upper()}", "no value at all")
            from_flag = flags.settings(config, parsed(folder, "--" + item.name.replace("_", "-"), value))
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


def test_settings_survive_the_way_to_a_child(folder: Path) -> None:
    engine = EngineConfig(dtype="float32", threads=3, max_num_seqs=5, enable_prefix_caching=False)
    lease = LeaseConfig(heartbeat=0.25, drain_timeout=7.5)
    arguments = parsed(folder, *as_flags(engine, lease))
    assert flags.settings(EngineConfig, arguments) == engine
    assert flags.settings(LeaseConfig, arguments) == lease


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "http"], "--port 'http' is not a whole number"),
        (["--port", "65536"], "--port 65536 is not a port number"),
        (["--threads", "-1"], "--threads -1 is too small"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 is too small"),
        (["--request-timeout", "nan"], "--request-timeout 'nan' is not a number"),
        (["--dtype", "int3"], "--dtype int3 is not one of auto, float32"),
        (["--heartbeat", "20"], "--heartbeat 20.0 must be shorter"),
        (["--max-model-len", "999", "--kv-cache-tokens", "99"], "doesn't fit in --kv-cache-tokens 99"),
        (["--kv-memory", "lots"], "--kv-memory 'lots' is neither"),
        (["--topology", "1E"], "no instance that decodes"),
        (["--topology", "1E1D"], "no instance that prefills"),
        (["--topology", "1E1X"], "not a row of counts and roles"),
        (["--topology", "0E1PD"], "zero instances"),
        (["--topology", "99E1PD"], "more than"),
        (["--topology", "1E1DP"], "'DP' is not a role"),
        (["--role", "X"], "--role X is not one of E, P, D, EP, PD, EPD, front-door"),
        (["--role", "E"], "--role E needs --join HOST:PORT"),
        (["--role", "E", "--join", "nowhere"], "--join 'nowhere' is not HOST:PORT"),
        (["--role", "E", "--join", "tcp://127.0.0.1:1"], "is not HOST:PORT"),
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


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in refused(capsys, "serve", tmp_path / "nowhere")
    assert str(tmp_path) in refused(capsys, "serve", tmp_path)
    for name in ("config.json", "tokenizer.json"):
        broken = make_checkpoint(tmp_path / f"without {name}")
        (broken / name).unlink()
        assert name in refused(capsys, "serve", broken, "--port", "0")
    assert "no-picture.png" in refused(capsys, "run", folder, tmp_path / "no-picture.png", "What is it?")


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


def test_commands_without_sense_show_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["serve"], ["serve", "demo", "--no-such-flag"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "usage: triptych" in capsys.readouterr().err


def test_the_default_topology_is_the_models(folder: Path, tmp_path: Path) -> None:
    text = make_tiny(tmp_path / "text", "qwen2")
    for model, expected in ((folder, "1E1PD"), (text, "1PD")):
        arguments = parsed(model)
        assert str(flags.topology(arguments, flags.serve_config(arguments), "1E1PD")) == expected
    asked = parsed(text, "--topology", "1P1D")
    assert str(flags.topology(asked, flags.serve_config(asked), "1E1PD")) == "1P1D"


def test_ranks_for_a_role_that_nobody_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve", "demo", "--topology", "1E1PD", "--tensor-parallel-size", "P=2")
    assert "names P, but the topology has E, PD" in said
