"""Changes of a running service's settings, as a rollout makes them."""

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any

from triptych.config.encode import EncodeConfig
from triptych.config.engine import EngineConfig
from triptych.config.service import ServeConfig
from triptych.config.settings import Settings, flag, names_of
from triptych.config.transfer import TransferConfig
from triptych.config.values import parse_value
from triptych.errors import ConfigError

GROUPS: dict[str, type[Settings]] = {"engine": EngineConfig, "encode": EncodeConfig, "transfer": TransferConfig}
"""The groups that may change, by their names in ``ServeConfig``: those of instances."""
ROW_SETTINGS = ("device", "dtype", "quantization", "encoder_quantization", "kv_cache_dtype", "fabric")
"""Settings that instances must share to exchange rows."""
FIXED = {
    "cpus": "the cores are those of the supervisor, which isn't replaced",
    **dict.fromkeys(ROW_SETTINGS, "old and new instances couldn't exchange rows; that needs another service"),
}
"""Settings of these groups that can't change, and why not."""

_OWN_NAMES = {name: item.name for group in GROUPS.values() for item in fields(group) for name in names_of(item)}
"""Each name of a setting, and its own."""


def changed(config: ServeConfig, settings: Mapping[str, str]) -> ServeConfig:
    """Return the service's settings with these changes, given as text by the names of settings. Raises ConfigError for
    a name that is no setting of instances, for a value that is invalid, and for a setting that can't change."""
    left: dict[str, str] = {}
    for given, text in settings.items():
        name = _OWN_NAMES.get(written := given.removeprefix("--").replace("-", "_"), written)
        if name in left:
            raise ConfigError(f"{flag(name)} is there twice: {left[name]!r} and {text!r}")
        left[name] = text
    groups = {}
    for group in GROUPS:
        own = getattr(config, group)
        values = {item.name: _value(item, left.pop(item.name), own) for item in fields(own) if item.name in left}
        groups[group] = replace(own, **values)
    if left:
        raise ConfigError(f"{flag(min(left))} is no setting of instances, and only those can change in a rollout")
    return replace(config, **groups)


def _value(item: Field[Any], text: str, group: Settings) -> Any:
    value = parse_value(text, item, flag(item.name))
    if item.name in FIXED and value != getattr(group, item.name):
        raise ConfigError(f"{flag(item.name)} can't change in a rollout: {FIXED[item.name]}")
    return value
