"""Weights in int8 with scales of outputs, of a tensor or of groups of inputs: compressed-tensors' ``int-quantized``
(``W8A8``) and bitsandbytes' 8 bits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.layers.stored.format import (
    ONE,
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
    from triptych.layers.stored.linears import StoredLinear

VALUES, SCALE, ZEROS = "weight", "weight_scale", "weight_zero_point"
"""Last parts of the names of a quantized module's tensors: int8 [out, in]; floats [1] or [out, groups]; int8 like the
scales."""


@dataclass(frozen=True)
class IntQuantized:
    """``StoredFormat`` of a group of such a checkpoint's layers."""

    markers: ClassVar[tuple[str, ...]] = (SCALE,)
    bits: int
    """Bits of the numbers that occur; they are stored in 8."""
    group: int | None
    """Inputs per group; None: all inputs of an output are one."""
    has_zeros: bool

    @classmethod
    def of_weights(cls, weights: Section) -> "IntQuantized":
        """Return the format that the ``weights`` of compressed-tensors describe. Raises CheckpointError for settings
        that aren't served."""
        for name, served in (
            ("num_bits", (4, 8)),
            ("type", ("int",)),
            ("strategy", ("tensor", "channel", "group")),
            ("symmetric", (True, False)),
            ("dynamic", (False, None)),
            ("actorder", (None, "weight", "static")),
        ):
            require(weights, name, served)
        group = group_size(weights) if weights["strategy"] == "group" else None
        return cls(weights["num_bits"], group, not weights["symmetric"])

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return kept_integers(8, self.group, has_zeros=self.has_zeros)

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        return f"int-quantized, {self.bits} bits {grouping(self.group)}" + ", with zero points" * self.has_zeros

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        is_int8 = tensors.has(VALUES) and tensors.dtype(VALUES) == "I8"
        return is_int8 and tensors.shape(SCALE) in self._shapes(shape)

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from triptych.layers.stored.integers import scaled_int8

        inputs = shape[1]
        values = tensors.read(VALUES, shape, ("int8",))
        group = inputs_per_group(self.group, inputs)
        grid, *others = self._shapes(shape)
        found = tensors.shape(SCALE)
        stored = found if found in others else grid
        scales = tensors.read(SCALE, stored, SCALE_DTYPES).reshape(-1, stored[-1] if len(stored) == 2 else 1)
        zeros = None
        if tensors.has(ZEROS):
            zeros = tensors.read(ZEROS, stored, ("int8", "int32")).reshape(scales.shape).expand(grid)
        return scaled_int8(values, scales.expand(grid), zeros, (tensors, SCALE, group))

    def _shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Return the shapes that scales of a weight may have, first one for each output and group."""
        outputs, inputs = shape
        groups = -(-inputs // inputs_per_group(self.group, inputs))
        return [(outputs, groups), *ONE, *([(outputs,)] if groups == 1 else [])]
