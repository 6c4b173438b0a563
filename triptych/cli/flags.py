"""Reads settings: from flags first, then TRIPTYCH_* variables, then a file, then the defaults in ``config``."""

import argparse
import dataclasses
import inspect
import math
import re
from argparse import SUPPRESS
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from triptych.checkpoint.config_files import MISTRAL_CONFIG, load_config, quantization_section
from triptych.checkpoint.gguf.index import SUFFIX
from triptych.checkpoint.safetensors_header import has_weights, no_weights, read_folder
from triptych.cli import sources
from triptych.cli.fitting import check_device, check_memory, computes_on_cpus
from triptych.cli.help_all import HelpAll, make_rare
from triptych.cli.spelling import Fits
from triptych.config import (
    CONFIG_GROUPS,
    ClusterConfig,
    EncodeConfig,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    ObserveConfig,
    ServeConfig,
    Settings,
    TransferConfig,
    check_value,
    flag,
    host_and_port,
    is_loopback,
    names_of,
    parse_value,
    public_fields,
    spellings,
    split_addresses,
)
from triptych.demo import MODEL_DIR
from triptych.errors import CheckpointError, ConfigError
from triptych.hub import Check, HubName, fetch, no_check
from triptych.layers.stored.registry import described_formats
from triptych.models.registry import family_of
from triptych.server.worker_extra import check_installed
from triptych.topology import Role, Topology

TEXT_ONLY = "1PD"
"""The default topology of a model that takes no media."""
ENCODERS_ONLY = "1E"
"""The default topology of a service whose answers come from servers of others."""

DEMO = "demo"
"""Name of the bundled model, accepted wherever a command takes a MODEL."""

G = TypeVar("G", bound=Settings)

START = ("model", "mmproj", "topology", "role", "join", "name")
"""What a file may have besides settings."""

_SETTINGS = {item.name: item for group in CONFIG_GROUPS for item in public_fields(group)}

_HOST_PORT = re.compile(r"[^\s/:*]+:\d{1,5}|\[[^\s/\]]+\]:\d{1,5}")


def add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    meaning = (
        "a checkpoint folder, a GGUF file, a name on the Hugging Face Hub (ORG/NAME[@REVISION]), or "
        f"{DEMO!r} for the bundled model"
    )
    parser.add_argument("model", metavar="MODEL", help=meaning, nargs=None if required else "?")
    parser.add_argument(
        "--mmproj", metavar="FILE", help="GGUF file with the encoders, of a MODEL that is a GGUF file (default: none)"
    )


def add_control(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control",
        metavar="HOST:PORT[,HOST:PORT]",
        required=True,
        help="control address of the frontend, which it prints when it is ready; of several, the first that answers is "
        "asked",
    )


def known_names() -> dict[str, Fits]:
    """Return the names of all settings, and whether a value fits."""
    return {name: _fits_setting(item) for item in _SETTINGS.values() for name in names_of(item)}


def fits(action: argparse.Action) -> Fits:
    """Return whether a value, or None for none, fits a flag, as far as that is known without running its command."""
    item = _setting_of(action)
    if action.nargs != 0 and item is not None:
        return _fits_setting(item)
    return lambda value: action.nargs == 0 or value is not None


def values_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the values that a setting's flag can have, if they are few."""
    item = _setting_of(action)
    return item.metadata["choices"] if item is not None and action.nargs != 0 else ()


def _setting_of(action: argparse.Action) -> dataclasses.Field[Any] | None:
    return next((item for item in _SETTINGS.values() if action.dest in names_of(item)), None)


def _fits_setting(item: dataclasses.Field[Any]) -> Fits:
    def fits(value: Any) -> bool:
        try:
            check_value(item, parse_value(value, item, ""))
        except ConfigError:
            return False
        return value is not None

    return fits


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of a service, in the groups of ``--help``, and one for a file of them."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file with a line for each setting, as in max-num-seqs = 8; flags and TRIPTYCH_* variables take "
        "precedence "
        "(default: none)",
    )
    parser.add_argument("--help-all", action=HelpAll, help="show all settings, and exit")
    for settings_class in CONFIG_GROUPS:
        add_group(parser, settings_class, hide_rare=True)


def add_group(parser: argparse.ArgumentParser, settings_class: type[Settings], *, hide_rare: bool = False) -> None:
    """Add a flag for each setting of one group; with ``hide_rare``, ``--help-all`` alone lists those that few need."""
    group = parser.add_argument_group((inspect.getdoc(settings_class) or "").partition("\n")[0].rstrip("."))
    for item in public_fields(settings_class):
        also = ", ".join(spellings(name)[0] for name in item.metadata["also"])
        also = f"; also {also}" if also else ""
        if off := ", ".join(map(flag, item.metadata["off"])):
            also += f"; {off} switch{'' if ',' in off else 'es'} it off"
        gpu = f"; on GPUs {_shown(item.metadata['gpu'])}" if item.metadata["gpu"] else ""
        text = f"{item.metadata['help']} (default: {_shown(item.default)}{gpu}{also})"
        text = text.replace("%", "%%")  # argparse takes it for a format
        for name in names_of(item):
            shown: dict[str, Any] = {"dest": name, "default": None, "help": text if name == item.name else SUPPRESS}
            if isinstance(item.default, bool):
                action = group.add_argument(flag(name), action=argparse.BooleanOptionalAction, **shown)
            else:
                action = group.add_argument(*spellings(name), metavar=name.upper().rsplit("_", 1)[-1], **shown)
            if hide_rare and not item.metadata["common"]:
                make_rare(action)
        for name in item.metadata["off"]:
            group.add_argument(flag(name), dest=item.name, action="store_false", default=None, help=SUPPRESS)


def settings(group: type[G], arguments: argparse.Namespace, *, on_gpu: bool = False) -> G:
    """Return a group of settings from flags, environment, file and defaults, which may differ ``on_gpu``; its paths are
    absolute. Raises ConfigError for an invalid value, for two that contradict each other, and for unknown names."""
    values = {item.name: gpu for item in dataclasses.fields(group) if on_gpu and (gpu := item.metadata["gpu"])}
    for item in public_fields(group):
        for given, source in _given(item, arguments):
            value = parse_value(given, item, source)
            values[item.name] = str(Path(value).absolute()) if item.metadata["path"] and value else value
            break
    return group(**values)


def is_given(name: str, arguments: argparse.Namespace) -> bool:
    """Return whether a setting was given by a flag, a variable or the file. Raises ConfigError as ``settings`` does."""
    return next(_given(_SETTINGS[name], arguments), None) is not None


def frontend_settings(arguments: argparse.Namespace) -> FrontendConfig:
    """Return all groups of a frontend. Raises ConfigError as ``settings`` does."""
    groups = {
        item.name: settings(cast(type[Settings], item.type), arguments) for item in dataclasses.fields(FrontendConfig)
    }
    return FrontendConfig(**cast(dict[str, Any], groups))


def fill_in_start(arguments: argparse.Namespace) -> None:
    """Fill in model, topology, role, join and name from the file where the command line has none. A role on the command
    line overrides the file's topology, which is for the service as a whole. Raises ConfigError when no model is
    named."""
    file = _besides_flags(arguments).file
    if "role" in file and "topology" in file:
        raise ConfigError(
            f"--config {arguments.config}: role {file['role']!r} and topology {file['topology']!r} exclude each other"
        )
    is_chosen = arguments.role is not None or arguments.topology is not None
    for name in START:
        if getattr(arguments, name) is None and name in file and not (is_chosen and name in ("role", "topology")):
            setattr(arguments, name, str(file[name]))
    if arguments.model is None:
        raise ConfigError("MODEL is missing: give a folder or ORG/NAME first, or as model in the file of --config")


@dataclasses.dataclass(frozen=True)
class _BesidesFlags:
    environment: sources.Values
    file: sources.Values


def _besides_flags(arguments: argparse.Namespace) -> _BesidesFlags:
    """Return the environment's and the file's settings; they are read once for each command."""
    if not hasattr(arguments, "besides_flags"):
        path, known = getattr(arguments, "config", None), known_names()
        arguments.besides_flags = _BesidesFlags(
            sources.from_environment(known),
            sources.from_file(path, known | dict.fromkeys(START, lambda value: value is not None)) if path else {},
        )
    return cast(_BesidesFlags, arguments.besides_flags)


def _given(item: dataclasses.Field[Any], arguments: argparse.Namespace) -> Iterator[tuple[Any, str]]:
    """Yield what was given for a setting, and where, the source with precedence first. Raises ConfigError when one
    source gives two values by two of its names."""
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
            both = " and ".join(f"{name} {value}" for name, value in found.items())
            raise ConfigError(f"{both} are one setting: give it once")
        yield from ((value, name) for name, value in found.items())


def serve_config(arguments: argparse.Namespace, *, needs_weights: bool = True) -> ServeConfig:
    """Return all settings of a service. Raises ConfigError, and StartError as ``model_folder`` does."""
    engine = settings(EngineConfig, arguments)
    # an encode instance loads towers alone, and a frontend nothing
    role = (getattr(arguments, "role", None) or "").upper()
    is_small = role in (Role.E, "FRONTEND")
    if needs_weights and role != "FRONTEND" and getattr(arguments, "on", None) is None:
        check_device(engine)
    on_gpu = getattr(arguments, "on", None) is None and not computes_on_cpus(engine.device)
    check = partial(check_memory, arguments.model, engine) if needs_weights and not is_small else no_check
    mmproj = getattr(arguments, "mmproj", None)
    return ServeConfig(
        model=model_folder(arguments.model, mmproj, needs_weights=needs_weights, check=check),
        engine=settings(EngineConfig, arguments, on_gpu=on_gpu),
        encode=settings(EncodeConfig, arguments, on_gpu=on_gpu),
        transfer=settings(TransferConfig, arguments),
        cluster=settings(ClusterConfig, arguments),
        frontend=frontend_settings(arguments),
        lease=settings(LeaseConfig, arguments),
        observe=settings(ObserveConfig, arguments),
    )


def number(text: str) -> float:
    """Return the number that an argument is. Raises ValueError, also for nan and inf."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def model_folder(name: str, mmproj: str | None = None, *, needs_weights: bool = True, check: Check = no_check) -> Path:
    """Return the checkpoint folder that MODEL names, downloaded if that is a name on the Hub; ``check`` is called
    before its weights are. ``mmproj`` names a file with the encoders of a GGUF file. Raises StartError as ``hub.fetch``
    does. Raises CheckpointError for a folder that isn't one of a model, whose weights are in a format that isn't
    served, or that lacks a shard; with ``needs_weights``, also for one that has none. Raises ConfigError for ``mmproj``
    without a GGUF file."""
    folder = MODEL_DIR if name == DEMO else Path(name)
    if folder.suffix == SUFFIX and folder.is_file():
        folder = _of_gguf(folder, mmproj)
    elif mmproj is not None:
        raise ConfigError(f"--mmproj {mmproj} is for a GGUF file as MODEL; {name} has its encoders, if it has any")
    if folder.is_file():
        what = no_weights([folder.name]).partition(" is ")[2] or "a file"
        raise CheckpointError(f"{name}: it is {what}; MODEL is a folder, or a name on the Hugging Face Hub")
    if folder.is_dir():
        folder = folder.resolve()
    elif hub_name := HubName.parse(name):
        folder = fetch(hub_name, (_check_served, check), needs_weights=needs_weights)
    else:
        raise CheckpointError(
            f"{name}: no such folder; MODEL may also be {DEMO!r}, or a name on the Hugging Face Hub, as ORG/NAME"
        )
    _check_served(folder)
    if needs_weights or has_weights(folder):
        read_folder(folder)
    return folder


def _of_gguf(file: Path, mmproj: str | None) -> Path:
    """Return the folder of a model in GGUF, with encoders if ``mmproj`` names a file of them. Raises CheckpointError as
    ``gguf_folder`` does, and StartError without the packages that it needs."""
    check_installed("a model in GGUF")
    from triptych.checkpoint.gguf.folder import gguf_folder

    return gguf_folder(file, None if mmproj is None else Path(mmproj))


def _check_served(folder: Path, _: int = 0) -> None:
    """Check what a folder's config says, before anything is said of weights that wouldn't help."""
    if any((folder / name).exists() for name in ("config.json", MISTRAL_CONFIG)):
        family_of(config := load_config(folder))
        described_formats(quantization_section(config))


def model_name(arguments: argparse.Namespace, config: ServeConfig) -> str:
    """Return the name that requests give as model: that of the folder or file, or as on the Hub."""
    given, path = arguments.model, Path(arguments.model)
    if named := config.frontend.http.served_model_name:
        return named
    if path.suffix == SUFFIX and path.is_file():
        return path.stem
    return given if given == DEMO or (HubName.parse(given) and not path.is_dir()) else config.model.name


def check_control(given_as: str, address: str, cluster: ClusterConfig) -> None:
    """Raise ConfigError unless ``address`` is the HOST:PORT of a frontend that could answer to this process."""
    host, port = host_and_port(address)
    if not _HOST_PORT.fullmatch(address) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{given_as} {address!r} is not HOST:PORT")
    if is_loopback(cluster.cluster_host) and not is_loopback(host):
        raise ConfigError(
            f"{given_as} {address} may be another machine, which couldn't answer to {cluster.cluster_host}: give the "
            "address that it reaches this one at with --cluster-host"
        )


def check_controls(given_as: str, addresses: str, cluster: ClusterConfig) -> list[str]:
    """Return the addresses of a list that is separated by commas. Raises ConfigError for one that ``check_control``
    rejects, and for one that is there twice."""
    parts = split_addresses(addresses)
    for number, address in enumerate(parts):
        check_control(given_as, address, cluster)
        if address in parts[:number]:
            raise ConfigError(f"{given_as} names {address} twice")
    return parts


def topology(arguments: argparse.Namespace, config: ServeConfig, default: str) -> Topology:
    """Return the topology asked for, or else ``default``, ``TEXT_ONLY`` for a text-only model, or ``ENCODERS_ONLY``
    with --engine. Raises TopologyError and CheckpointError."""
    if config.frontend.engines.urls:
        return Topology.parse(arguments.topology or ENCODERS_ONLY, decodes=False)
    if arguments.topology is None and not family_of(load_config(config.model)).takes_media:
        return Topology.parse(TEXT_ONLY)
    return Topology.parse(arguments.topology or default)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "none"
    return str(default) or "none"
