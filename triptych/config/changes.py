"""Changes of a running service's settings, as a rollout makes them."""

from collections.abc import Mapping
from dataclasses import fields, replace

from triptych.config.encode import EncodeConfig
from triptych.config.engine import EngineConfig
from triptych.config.service import ServeConfig
from triptych.config.settings import flag, names_of
from triptych.config.transfer import TransferConfig
from triptych.config.values import parse_value
from triptych.errors import ConfigError

GROUPS = {"engine": EngineConfig, "encode": EncodeConfig, "transfer": TransferConfig}
"""The groups that may change, by their names in ``ServeConfig``: those of instances."""
ROW_SETTINGS = ("device", "dtype", "quantization", "kv_cache_dtype", "fabric")
"""Settings that instances must share to exchange rows."""
FIXED = {
    "cpus": "the cores are those of the supervisor, which isn't replaced",
    **dict.fromkeys(ROW_SETTINGS, "old and new instances couldn't exchange rows; that needs another service"),
}
"""Settings of these groups that can't change, and why not."""


def changed(config: ServeConfig, settings: Mapping[str, str]) -> ServeConfig:
    """Return the service's settings with these changes, given as text by the names of settings. Raises ConfigError for
    a name that is no setting of instances, for a value that is invalid, and for a setting that can't change."""
    left = {name.removeprefix("--").replace("-", "_"): text for name, text in settings.items()}
    if len(left) < len(settings):
        raise ConfigError(f"one of {', '.join(settings)} is there twice")
    groups = {}
    for group in GROUPS:
        own = getattr(config, group)
        values = {}
        for item in fields(own):
            for name in [name for name in names_of(item) if name in left]:
                value = parse_value(left.pop(name), item, flag(name))
                if item.name in FIXED and value != getattr(own, item.name):
                    raise ConfigError(f"{flag(item.name)} can't change in a rollout: {FIXED[item.name]}")
                values[item.name] = value
        groups[group] = replace(own, **values)
    if left:
        raise ConfigError(f"{flag(min(left))} is no setting of instances, and only those can change in a rollout")
    return replace(config, **groups)
