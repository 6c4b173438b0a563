"""Where settings come from: flags first, then TRIPTYCH_* variables, then the defaults in ``config.py``."""

import argparse
import dataclasses
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from triptych.config import (
    ClusterConfig,
    EngineConfig,
    FrontDoorConfig,
    LeaseConfig,
    ObserveConfig,
    ServeConfig,
    TransferConfig,
    flag,
    is_loopback,
)
from triptych.demo import MODEL_DIR
from triptych.errors import CheckpointError, ConfigError
from triptych.families.registry import family_of
from triptych.models.config_files import load_config
from triptych.models.safetensors_header import read_folder
from triptych.topology import Topology

TEXT_ALONE = "1PD"
"""The topology for a model that has nothing to encode, unless another is asked for."""

DEMO = "demo"
"""The bundled model's name, wherever a MODEL is asked for."""

C = TypeVar("C")

_HOST_PORT = re.compile(r"[^\s/:*]+:\d{1,5}|\[[^\s/\]]+\]:\d{1,5}")

log = logging.getLogger(__name__)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a checkpoint folder, or {DEMO!r} for the bundled model")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The flags of who may talk to a service's processes."""
    _add_group(parser, "where processes meet and whom they trust", ClusterConfig)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting of a service, in groups of ``--help``."""
    _add_group(parser, "how instances compute", EngineConfig)
    _add_group(parser, "how rows travel", TransferConfig)
    add_trust(parser)
    _add_group(parser, "what the front door accepts", FrontDoorConfig)
    _add_group(parser, "how processes start, live and end", LeaseConfig)
    _add_group(parser, "what processes tell of themselves", ObserveConfig)


def _add_group(parser: argparse.ArgumentParser, title: str, config: type[Any]) -> None:
    group = parser.add_argument_group(title)
    for item in dataclasses.fields(config):
        text = f"{item.metadata['help']} (default: {_shown(item.default)})"
        if isinstance(item.default, bool):
            group.add_argument(
                flag(item.name), dest=item.name, default=None, action=argparse.BooleanOptionalAction, help=text
            )
            continue
        group.add_argument(
            flag(item.name),
            dest=item.name,
            default=None,
            metavar=item.name.upper().rsplit("_", 1)[-1],
            help=text,
        )


def settings(config: type[C], arguments: argparse.Namespace) -> C:
    """A config from flags, environment and defaults. Raises ConfigError for a value that isn't one."""
    values = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        variable = f"TRIPTYCH_{item.name.upper()}"
        given, source = getattr(arguments, item.name), flag(item.name)
        if given is None and (value := _from_environment(variable)) is not None:
            given, source = value, variable
        if given is not None:
            values[item.name] = _parsed(given, item.default, source)
    return config(**values)


def serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """All settings of a service. Raises ConfigError and CheckpointError."""
    return ServeConfig(
        model=model_folder(arguments.model),
        engine=settings(EngineConfig, arguments),
        transfer=settings(TransferConfig, arguments),
        cluster=settings(ClusterConfig, arguments),
        front_door=settings(FrontDoorConfig, arguments),
        lease=settings(LeaseConfig, arguments),
        observe=settings(ObserveConfig, arguments),
    )


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
    return config.front_door.served_model_name or (DEMO if arguments.model == DEMO else config.model.name)


def check_control(given_as: str, address: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError for what isn't the HOST:PORT of a front door, or of one that couldn't answer."""
    if not _HOST_PORT.fullmatch(address):
        raise ConfigError(f"{given_as} {address!r} is not HOST:PORT")
    host = address.rpartition(":")[0].strip("[]")
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


def _from_environment(variable: str) -> str | None:
    """Kubernetes sets TRIPTYCH_PORT=tcp://… in pods beside a service named triptych. Nobody means that as a setting,
    and to refuse it would make the service's name decide whether Triptych starts."""
    value = os.environ.get(variable)
    if value is None or not value.startswith(("tcp://", "udp://", "sctp://")):
        return value
    log.warning("%s=%s comes from Kubernetes, not from you; ignoring it", variable, value)
    return None


def _parsed(given: str, default: Any, source: str) -> Any:
    if isinstance(default, bool):
        return _truth(str(given), source)
    if isinstance(default, tuple):
        return tuple(part.strip() for part in given.split(",") if part.strip())
    try:
        value = type(default)(given)
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
