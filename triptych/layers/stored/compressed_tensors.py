"""compressed-tensors' format ``pack-quantized`` (https://github.com/vllm-project/compressed-tensors) with 4 bits in
groups, which ``triptych quantize`` writes, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import LayerTensors, Section, config_groups, require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from triptych.layers.grouped_weight import GroupedWeight

PACKED, SCALE, ZEROS, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Last parts of the names of a quantized module's tensors: int32 [out, ceil(in / 8)]; floats [out, groups]; int32
[ceil(out / 8), groups]; integers [2]."""
FLOATS = ("bfloat16", "float16", "float32")
"""Dtypes of scales."""
GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale."""
PER_WORD = 8


@dataclass(frozen=True)
class GroupQuantization:
    """4-bit weights in groups along the inputs."""

    group: int
    """Inputs per group, one of ``GROUP_SIZES``."""
    has_zeros: bool
    """Whether groups have zero points (asymmetric quantization)."""


@dataclass(frozen=True)
class PackQuantized:
    """``StoredFormat`` of such checkpoints."""

    markers: ClassVar[tuple[str, ...]] = (PACKED,)
    kept_as: ClassVar[str | None] = "int4"
    quantization: GroupQuantization

    @classmethod
    def of(cls, section: Section) -> "PackQuantized":
        """Return the format that a config's section describes. Raises CheckpointError."""
        require(section, "kv_cache_scheme", (None,))
        found = {_parse_group(group) for group in config_groups(section)}
        if len(found) > 1:
            raise CheckpointError(f"config.json: {QUANTIZATION}: config_groups with different weights aren't served")
        return cls(found.pop())

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        zeros = ", with zero points" if self.quantization.has_zeros else ""
        return f"compressed-tensors pack-quantized, 4 bits in groups of {self.quantization.group}{zeros}"

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "GroupedWeight":
        """See ``StoredFormat``."""
        from triptych.layers.grouped_weight import GroupedWeight, unpacked

        (outputs, inputs), group = shape, self.quantization.group
        groups = -(-inputs // group)
        words = tensors.read(PACKED, (outputs, -(-inputs // PER_WORD)), ("int32",))
        scales = tensors.read(SCALE, (outputs, groups), FLOATS)
        if (found := tensors.read(SHAPE, (2,)).tolist()) != list(shape):
            raise tensors.wrong(f"{SHAPE} is {found}; the config makes it {list(shape)}")
        halves = scales.half()
        if not halves.is_meta and not halves.isfinite().all():
            raise tensors.wrong(f"{SCALE} has values that float16 doesn't represent")
        zeros = None
        if self.quantization.has_zeros:
            packed = tensors.read(ZEROS, (-(-outputs // PER_WORD), groups), ("int32",))
            zeros = unpacked(packed.T)[:, :outputs].T.contiguous()
        return GroupedWeight(words, halves, zeros, inputs, group)


def _parse_group(group: Section) -> GroupQuantization:
    for name in ("input_activations", "output_activations"):
        require(group, name, (None,))
    weights = group["weights"]
    for name, served in (
        ("num_bits", (4,)),
        ("type", ("int",)),
        ("strategy", ("group",)),
        ("group_size", GROUP_SIZES),
        ("symmetric", (True, False)),
        ("dynamic", (False, None)),
        ("actorder", (None, "weight", "static")),  # "group" reorders the inputs
    ):
        require(weights, name, served)
    return GroupQuantization(weights["group_size"], not weights["symmetric"])


def stored_tensors(weight: "GroupedWeight", dtype: "torch.dtype") -> "dict[str, Tensor]":
    """Return a weight as a checkpoint's tensors, from which ``PackQuantized`` makes it again, with scales in ``dtype``
    or, if a checkpoint can't have scales in it, in float32."""
    import torch
    from torch.nn import functional as F

    from triptych.layers.grouped_weight import packed

    is_served = str(dtype).removeprefix("torch.") in FLOATS
    stored = {
        PACKED: weight.words.contiguous(),
        SCALE: weight.scales.to(dtype if is_served else torch.float32),
        SHAPE: torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        stored[ZEROS] = packed(F.pad(weight.zeros.T, (0, -len(weight.zeros) % PER_WORD))).T.contiguous()
    return stored


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
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
