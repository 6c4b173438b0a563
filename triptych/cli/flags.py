"""Where settings come from: flags first, then TRIPTYCH_* variables, then a file, then the defaults in ``config.py``."""

import argparse
import dataclasses
import math
import re
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import read_folder
from triptych.cli import sources
from triptych.config import (
    ClusterConfig,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    ObserveConfig,
    ServeConfig,
    TransferConfig,
    flag,
    is_loopback,
    names_of,
)
from triptych.demo import MODEL_DIR
from triptych.errors import CheckpointError, ConfigError
from triptych.models.registry import family_of
from triptych.topology import Topology

TEXT_ALONE = "1PD"
"""The topology for a model that has nothing to encode, unless another is asked for."""

DEMO = "demo"
"""The bundled model's name, wherever a MODEL is asked for."""

C = TypeVar("C")

CONFIGS = (EngineConfig, TransferConfig, ClusterConfig, FrontendConfig, LeaseConfig, ObserveConfig)
START = ("model", "topology", "role", "join", "name")
"""What a file may say besides settings."""
NOT_SETTINGS = ("supervisor",)
"""Variables that only processes of the service set for each other."""

_HOST_PORT = re.compile(r"[^\s/:*]+:\d{1,5}|\[[^\s/\]]+\]:\d{1,5}")


def add_model(parser: argparse.ArgumentParser, *, may_be_in_file: bool = False) -> None:
    meaning = f"a checkpoint folder, or {DEMO!r} for the bundled model"
    parser.add_argument("model", metavar="MODEL", help=meaning, nargs="?" if may_be_in_file else None)


def known_names() -> set[str]:
    """Every name that a setting has."""
    return {name for config in CONFIGS for item in dataclasses.fields(config) for name in names_of(item)}


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The flags of who may talk to a service's processes."""
    _add_group(parser, "where processes meet and whom they trust", ClusterConfig)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting of a service, in groups of ``--help``, and one for a file of them."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file with a line for each setting, as in max-num-seqs = 8; flags and TRIPTYCH_* variables win "
        "(default: none)",
    )
    _add_group(parser, "how instances compute", EngineConfig)
    _add_group(parser, "how rows are transferred between instances", TransferConfig)
    add_trust(parser)
    _add_group(parser, "what the frontend accepts", FrontendConfig)
    _add_group(parser, "how processes start and end", LeaseConfig)
    _add_group(parser, "logs and traces", ObserveConfig)


def _add_group(parser: argparse.ArgumentParser, title: str, config: type[Any]) -> None:
    group = parser.add_argument_group(title)
    for item in dataclasses.fields(config):
        also = ", ".join(map(flag, item.metadata["also"]))
        text = f"{item.metadata['help']} (default: {_shown(item.default)}{'; also ' + also if also else ''})"
        text = text.replace("%", "%%")  # argparse takes it for a format
        for name in names_of(item):
            shown: dict[str, Any] = {"dest": name, "default": None, "help": text if name == item.name else SUPPRESS}
            if isinstance(item.default, bool):
                group.add_argument(flag(name), action=argparse.BooleanOptionalAction, **shown)
            else:
                group.add_argument(flag(name), metavar=name.upper().rsplit("_", 1)[-1], **shown)


def settings(config: type[C], arguments: argparse.Namespace) -> C:
    """A config from flags, environment, file and defaults; its paths are absolute. Raises ConfigError for a value that
    isn't one, for two that contradict each other, and for names that no setting has."""
    values = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        for given, source in _given(item, arguments):
            value = _parsed(given, item.default, source)
            values[item.name] = str(Path(value).absolute()) if item.metadata["path"] and value else value
            break
    return config(**values)


def fill_in_start(arguments: argparse.Namespace) -> None:
    """Takes from the file what of model, topology and so on wasn't given. A role that was given stands for itself: the
    file's topology is for the service as a whole. Raises ConfigError when no model is named."""
    file = _besides_flags(arguments).file
    if "role" in file and "topology" in file:
        raise ConfigError(
            f"--config {arguments.config}: role {file['role']!r} and topology {file['topology']!r} exclude each other"
        )
    what = arguments.role is not None or arguments.topology is not None
    for name in START:
        if getattr(arguments, name) is None and name in file and not (what and name in ("role", "topology")):
            setattr(arguments, name, str(file[name]))
    if arguments.model is None:
        raise ConfigError("which MODEL? Give a checkpoint folder first, or as model in the file of --config")


@dataclasses.dataclass(frozen=True)
class _BesidesFlags:
    environment: sources.Values
    file: sources.Values


def _besides_flags(arguments: argparse.Namespace) -> _BesidesFlags:
    """Read once for each command."""
    if not hasattr(arguments, "besides_flags"):
        path, known = getattr(arguments, "config", None), known_names()
        arguments.besides_flags = _BesidesFlags(
            sources.from_environment(known | set(NOT_SETTINGS)),
            sources.from_file(path, known | set(START)) if path else {},
        )
    return cast(_BesidesFlags, arguments.besides_flags)


def _given(item: dataclasses.Field[Any], arguments: argparse.Namespace) -> Iterator[tuple[Any, str]]:
    """What was given for a setting, and where: the source that wins first. Raises ConfigError when one source says two
    things by two of its names."""
    names = names_of(item)
    environment, file = _besides_flags(arguments).environment, _besides_flags(arguments).file
    for found in (
        {flag(name): value for name in names if (value := getattr(arguments, name, None)) is not None},
        {sources.as_variable(name): environment[name] for name in names if name in environment},
        {f"--config {arguments.config}: {sources.as_key(name)}": file[name] for name in names if name in file}
        if file
        else {},
    ):
        if len({str(value) for value in found.values()}) > 1:
            said = " and ".join(f"{name} {value}" for name, value in found.items())
            raise ConfigError(f"{said} are one setting: give it once")
        yield from ((value, name) for name, value in found.items())


def serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """All settings of a service. Raises ConfigError and CheckpointError."""
    return ServeConfig(
        model=model_folder(arguments.model),
        engine=settings(EngineConfig, arguments),
        transfer=settings(TransferConfig, arguments),
        cluster=settings(ClusterConfig, arguments),
        frontend=settings(FrontendConfig, arguments),
        lease=settings(LeaseConfig, arguments),
        observe=settings(ObserveConfig, arguments),
    )


def number(text: str) -> float:
    """An argument's number. Raises ValueError for nan and inf, too."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def model_folder(name: str) -> Path:
    """The checkpoint folder that MODEL names. Raises CheckpointError when it isn't one, or a shard is missing."""
    folder = MODEL_DIR if name == DEMO else Path(name)
    if not folder.is_dir():
        raise CheckpointError(f"{name}: no such folder, and the only bundled model is {DEMO!r}")
    folder = folder.resolve()
    read_folder(folder)
    return folder


def model_name(arguments: argparse.Namespace, config: ServeConfig) -> str:
    """What requests call the model."""
    return config.frontend.served_model_name or (DEMO if arguments.model == DEMO else config.model.name)


def check_control(given_as: str, address: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError for what isn't the HOST:PORT of a frontend, or of one that couldn't answer."""
    host, _, port = address.rpartition(":")
    if not _HOST_PORT.fullmatch(address) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{given_as} {address!r} is not HOST:PORT")
    host = host.strip("[]")
    if is_loopback(cluster.cluster_host) and not is_loopback(host):
        raise ConfigError(
            f"{given_as} {address} may be another machine, which couldn't answer to {cluster.cluster_host}: give the "
            "address that it reaches this one at with --cluster-host"
        )


def topology(arguments: argparse.Namespace, config: ServeConfig, default: str) -> Topology:
    """The topology asked for, or ``default``, or that without its encoders for a model of text alone. Raises
    TopologyError and CheckpointError."""
    if arguments.topology is None and not family_of(load_config(config.model)).takes_media:
        return Topology.parse(TEXT_ALONE)
    return Topology.parse(arguments.topology or default)


def _parsed(given: Any, default: Any, source: str) -> Any:
    """A value of the default's type. ``given`` is text, or what TOML makes of a line."""
    if isinstance(default, bool):
        return given if isinstance(given, bool) else _truth(str(given), source)
    if isinstance(default, tuple):
        parts = given if isinstance(given, list) else str(given).split(",")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    try:
        fits = isinstance(given, str | type(default)) or (isinstance(default, float) and isinstance(given, int))
        value = type(default)(given) if fits and not isinstance(given, bool) else math.nan
    except ValueError:
        value = math.nan
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{source} {given!r} is not {_A[type(default)]}")
    return value


def _truth(given: str, source: str) -> bool:
    words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if (truth := words.get(given.strip().lower())) is None:
        raise ConfigError(f"{source} {given!r} is not one of {', '.join(words)}")
    return truth


_A = {int: "a whole number", float: "a number", str: "text"}


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if default not in ("", ()) else "none"
