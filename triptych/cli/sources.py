"""Reads settings from ``TRIPTYCH_*`` variables and from a TOML file, and explains unknown names."""

import logging
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.cli.spelling import Fits, instead
from triptych.errors import ConfigError

PREFIX = "TRIPTYCH_"

Values = Mapping[str, Any]
"""Name of a setting, with underscores → what was given for it."""

# Kubernetes sets variables in pods for each service of their namespace; those for a service called triptych or
# triptych-something begin like ours.
_FROM_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
_ADDRESSES = ("tcp://", "udp://", "sctp://")

log = logging.getLogger(__name__)


def from_environment(known: Mapping[str, Fits]) -> Values:
    """Return the settings given by variables, as text. Raises ConfigError for a variable that is no setting, unless
    Kubernetes set it."""
    values = {}
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or _FROM_KUBERNETES.fullmatch(variable):
            continue
        if value.startswith(_ADDRESSES):
            # TRIPTYCH_PORT is a setting, too, but never an address. Refusing it would make the name of a service decide
            # whether Triptych starts
            log.warning("%s=%s was set by Kubernetes; ignoring it", variable, value)
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise ConfigError(f"{variable}={value} is no setting{instead(name, value, known, as_variable)}")
        values[name] = value
    return values


def from_file(path: Path, known: Mapping[str, Fits]) -> Values:
    """Return the settings of a TOML file: a line for each, under the names that flags have, with - or _. Raises
    ConfigError for a file that can't be read, and for a name in it that is no setting."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    values: dict[str, Any] = {}
    for written, value in table.items():
        name = written.replace("-", "_")
        if name not in known:
            other = instead(name, value, known, as_key)
            raise ConfigError(f"--config {path}: {written} = {value!r} is no setting{other}")
        if isinstance(value, dict):
            raise ConfigError(f"--config {path}: [{written}] is a table; settings are lines of their own")
        if name in values:
            raise ConfigError(f"--config {path}: {written} is there twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def as_key(name: str) -> str:
    return name.replace("_", "-")


def as_flag(name: str) -> str:
    return "--" + as_key(name)


def as_variable(name: str) -> str:
    return PREFIX + name.upper()
