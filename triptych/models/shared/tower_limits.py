"""Checks of the settings of towers. Limits bound what a damaged config can make a process allocate. No torch."""

from triptych.errors import CheckpointError

MAX_LAYERS = 1000


def check_layers(num_layers: int, section: str = "vision_config") -> None:
    """Raise CheckpointError, naming the section of config.json, for more layers than ``MAX_LAYERS``."""
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: {section}.num_hidden_layers must be at most {MAX_LAYERS}")


def check_heads(hidden_size: int, num_heads: int, section: str = "vision_config") -> None:
    """Raise CheckpointError, naming the section of config.json, unless all heads have the same number of values."""
    if hidden_size % num_heads:
        raise CheckpointError(f"config.json: {num_heads} heads don't divide {section}.hidden_size")


def features_of(value: object, layers: int) -> int:
    """Return the layer after which hidden states are features, from 0 to ``layers``; negative ones count from the end.
    Raises CheckpointError for another one."""
    if type(value) is not int or not -layers - 1 <= value <= layers:
        raise CheckpointError(f"config.json: vision_feature_layer {value!r} in a tower of {layers} layers")
    return value % (layers + 1)
