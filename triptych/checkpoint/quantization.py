"""Reads and writes what a checkpoint's config says of quantized weights. No torch: ``triptych doctor`` uses this too.

Served are the weights of compressed-tensors' format ``pack-quantized`` with 4 bits in groups
(https://github.com/vllm-project/compressed-tensors). A module ``M`` is quantized if there is a tensor
``M.weight_packed``, whatever names the config lists.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError

PACKED, SCALE, ZEROS, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Last parts of the names of a quantized module's tensors: int32 [out, ceil(in / 8)]; floats [out, groups]; int32
[ceil(out / 8), groups]; integers [2]."""
GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale."""
SECTION = "quantization_config"
_METHOD, _FORMAT = "compressed-tensors", "pack-quantized"


@dataclass(frozen=True)
class GroupQuantization:
    """4-bit weights in groups along the inputs."""

    group: int
    """Inputs per group, one of ``GROUP_SIZES``."""
    has_zeros: bool
    """Whether groups have zero points (asymmetric quantization)."""


def is_packed(tensors: Iterable[str]) -> bool:
    """Return whether the names of a checkpoint's tensors are those of quantized weights."""
    return any(name.endswith(f".{PACKED}") for name in tensors)


def described_quantization(config: Mapping[str, Any]) -> GroupQuantization | None:
    """Return the quantization that a ``config.json`` describes, or None. Raises CheckpointError for one that isn't
    served."""
    section = config.get(SECTION)
    if section is None and isinstance(text := config.get("text_config"), Mapping):
        section = text.get(SECTION)
    return None if section is None else _parse(section)


def read_quantization(config: Mapping[str, Any], tensors: Iterable[str]) -> GroupQuantization | None:
    """Return how a checkpoint's weights are quantized, or None, for its ``config.json`` and its tensors' names.

    Raises CheckpointError for a quantization that isn't served, and if config and tensors contradict each other.
    """
    found = described_quantization(config)
    if (found is not None) != is_packed(tensors):
        there, missing = ("a", "no") if found is not None else ("no", "a")
        raise CheckpointError(f"config.json has {there} {SECTION}, but the checkpoint has {missing} tensor *.{PACKED}")
    return found


def quantization_config(quantization: GroupQuantization, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the section of ``config.json`` for a checkpoint whose linear layers are quantized, but for the modules
    that ``ignore`` names: names, or ``re:`` and a regular expression."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": quantization.group,
        "symmetric": not quantization.has_zeros,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _parse(section: Any) -> GroupQuantization:
    """Return the quantization that a ``quantization_config`` describes. Raises CheckpointError."""
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {SECTION} must be an object, not {section!r}")
    _require(section, "quant_method", (_METHOD,))
    _require(section, "format", (_FORMAT,))
    _require(section, "kv_cache_scheme", (None,))
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(one, Mapping) for one in groups.values()):
        raise CheckpointError(f"config.json: {SECTION}: config_groups must be objects by name, not {groups!r}")
    found = {_parse_group(group) for group in groups.values()}
    if len(found) > 1:
        raise CheckpointError(f"config.json: {SECTION}: config_groups with different weights aren't served")
    return found.pop()


def _parse_group(group: Mapping[str, Any]) -> GroupQuantization:
    for name in ("input_activations", "output_activations"):
        _require(group, name, (None,))
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"config.json: {SECTION}: weights must be an object, not {weights!r}")
    for name, served in (
        ("num_bits", (4,)),
        ("type", ("int",)),
        ("strategy", ("group",)),
        ("group_size", GROUP_SIZES),
        ("symmetric", (True, False)),
        ("dynamic", (False, None)),
        ("actorder", (None, "weight", "static")),  # "group" reorders the inputs
    ):
        _require(weights, name, served)
    return GroupQuantization(weights["group_size"], not weights["symmetric"])


def _require(section: Mapping[str, Any], name: str, served: Sequence[object]) -> None:
    value = section.get(name)
    if not any(type(value) is type(one) and value == one for one in served):
        options = ", ".join(map(repr, served))
        raise CheckpointError(f"config.json: {SECTION}: {name} {value!r} is not served; served: {options}")
