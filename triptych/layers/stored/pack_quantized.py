"""compressed-tensors' format ``pack-quantized`` (https://github.com/vllm-project/compressed-tensors) with 4 or 8 bits
in groups, which ``triptych quantize`` writes, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import (
    KERNEL_GROUPS,
    SCALE_DTYPES,
    LayerTensors,
    Section,
    group_size,
    grouping,
    inputs_per_group,
    kept_integers,
    require,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from triptych.layers.grouped_weight import GroupedWeight
    from triptych.layers.stored.linears import StoredLinear

PACKED, SCALE, ZEROS, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
ORDER = "weight_g_idx"
"""Last parts of the names of a quantized module's tensors: int32 [out, ceil(in * bits / 32)]; floats [out, groups];
int32 [ceil(out * bits / 32), groups]; integers [2]; int32 [in], each input's group."""
GROUP_SIZES = KERNEL_GROUPS
"""Numbers of inputs that may share a scale in what ``triptych quantize`` writes."""
PER_WORD = 8


@dataclass(frozen=True)
class GroupQuantization:
    """What ``triptych quantize`` writes: 4-bit weights in groups along the inputs."""

    group: int
    """Inputs per group, one of ``GROUP_SIZES``."""
    has_zeros: bool
    """Whether groups have zero points (asymmetric quantization)."""


@dataclass(frozen=True)
class PackQuantized:
    """``StoredFormat`` of a group of such a checkpoint's layers."""

    markers: ClassVar[tuple[str, ...]] = (PACKED,)
    bits: int
    group: int | None
    """Inputs per group; None: all inputs of an output are one."""
    has_zeros: bool
    is_ordered: bool = False
    """Whether any inputs may be a group."""

    @classmethod
    def of(cls, weights: Section) -> "PackQuantized":
        """Return the format that a group's ``weights`` describe. Raises CheckpointError for settings that aren't
        served."""
        for name, served in (
            ("num_bits", (4, 8)),
            ("type", ("int",)),
            ("strategy", ("group", "channel")),
            ("symmetric", (True, False)),
            ("dynamic", (False, None)),
            ("actorder", (None, "weight", "static", "group")),  # the inputs of "group" alone are in another order
        ):
            require(weights, name, served)
        size = group_size(weights)
        if (size is None) != (weights["strategy"] == "channel"):
            raise CheckpointError(
                f"config.json: {QUANTIZATION}: group_size {size!r} contradicts strategy {weights['strategy']!r}"
            )
        return cls(weights["num_bits"], size, not weights["symmetric"], weights.get("actorder") == "group")

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return kept_integers(self.bits, self.group, is_ordered=self.is_ordered, has_zeros=self.has_zeros)

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        parts = [f"pack-quantized, {self.bits} bits {grouping(self.group)}"]
        parts += ["with zero points"] * self.has_zeros + ["in any order"] * self.is_ordered
        return ", ".join(parts)

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        (outputs, inputs), per_word = shape, 32 // self.bits
        groups = -(-inputs // inputs_per_group(self.group, inputs))
        return (
            tensors.shape(PACKED) == (outputs, -(-inputs // per_word))
            and tensors.shape(SCALE) == (outputs, groups)
            and tensors.has(ZEROS) == self.has_zeros
        )

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from triptych.layers.stored.integers import IntegerWeight, group_order, of_bits

        outputs, inputs = shape
        group, per_word = inputs_per_group(self.group, inputs), 32 // self.bits
        groups = -(-inputs // group)
        words = tensors.read(PACKED, (outputs, -(-inputs // per_word)), ("int32",))
        scales = tensors.read(SCALE, (outputs, groups), SCALE_DTYPES)
        if (found := tensors.read(SHAPE, (2,)).tolist()) != list(shape):
            raise tensors.wrong(f"{SHAPE} is {found}; the config makes it {list(shape)}")
        zeros = None
        if self.has_zeros:
            packed = tensors.read(ZEROS, (-(-outputs // per_word), groups), ("int32",))
            zeros = of_bits(packed.T, self.bits)[:, :outputs].T
        order = group_order(tensors, ORDER, inputs, group) if self.is_ordered and tensors.has(ORDER) else None
        return IntegerWeight(words, self.bits, scales, zeros, inputs, group, order).stored(tensors, SCALE)


def stored_tensors(weight: "GroupedWeight", dtype: "torch.dtype") -> "dict[str, Tensor]":
    """Return a weight as a checkpoint's tensors, from which ``PackQuantized`` makes it again, with scales in ``dtype``
    or, if a checkpoint can't have scales in it, in float32. Raises ValueError for a weight with offsets, which the
    format doesn't have."""
    import torch
    from torch.nn import functional as F

    from triptych.layers.grouped_weight import packed

    if weight.offsets is not None:
        raise ValueError("pack-quantized has no offsets")
    is_served = str(dtype).removeprefix("torch.") in SCALE_DTYPES
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
