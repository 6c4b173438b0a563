"""MXFP4: 4-bit floating point whose groups of 32 inputs have scales that are powers of 2: gpt-oss has experts in it,
and compressed-tensors stores it (``mxfp4-pack-quantized``)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.layers.stored.format import LayerTensors, Section, require
from triptych.layers.stored.fp4 import PER_BYTE, check_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from triptych.layers.stored.linears import ScaledWeight

GROUP = 32
BLOCKS, EXPONENTS = "blocks", "scales"
"""Last parts of the names of a layer's tensors, of gpt-oss: uint8 [out, in / 32, 16], the first of two inputs in the
lower bits; uint8 [out, in / 32], 127 more than a power of 2."""
PACKED, SCALES = "weight_packed", "weight_scale"
"""Those of compressed-tensors: uint8 [out, in / 2]; uint8 as above."""


@dataclass(frozen=True)
class Mxfp4Blocks:
    """``StoredFormat`` of gpt-oss."""

    markers: ClassVar[tuple[str, ...]] = (BLOCKS,)
    kept_as: ClassVar[str | None] = None
    described: ClassVar[str] = "MXFP4, 4-bit floating point in groups of 32"

    @classmethod
    def of(cls, section: Section) -> "list[Mxfp4Blocks]":
        """Return the formats that a config's section describes."""
        return [cls()]

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return True

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        outputs, inputs = shape
        check_inputs(tensors, inputs, GROUP)
        codes = tensors.read(BLOCKS, (outputs, inputs // GROUP, GROUP // PER_BYTE), ("uint8",)).flatten(1)
        return _weight(tensors, shape, codes, EXPONENTS)


@dataclass(frozen=True)
class Mxfp4Packed:
    """``StoredFormat`` of a group of layers of compressed-tensors."""

    markers: ClassVar[tuple[str, ...]] = (PACKED,)
    kept_as: ClassVar[str | None] = None
    described: ClassVar[str] = "mxfp4-pack-quantized, 4-bit floating point in groups of 32"

    @classmethod
    def of_weights(cls, weights: Section) -> "Mxfp4Packed":
        """Return the format that the ``weights`` of compressed-tensors describe. Raises CheckpointError for settings
        that aren't served."""
        for name, served in (
            ("num_bits", (4,)),
            ("type", ("float",)),
            ("strategy", ("group",)),
            ("group_size", (GROUP,)),
            ("symmetric", (True,)),
            ("dynamic", (False, None)),
        ):
            require(weights, name, served)
        return cls()

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return tensors.has(SCALES) and tensors.dtype(SCALES) == "U8"

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        outputs, inputs = shape
        check_inputs(tensors, inputs, GROUP)
        codes = tensors.read(PACKED, (outputs, inputs // PER_BYTE), ("uint8",))
        return _weight(tensors, shape, codes, SCALES)


def _weight(tensors: LayerTensors, shape: tuple[int, int], codes: "Tensor", kind: str) -> "ScaledWeight":
    from triptych.layers.stored.float_codes import coded_weight, powers
    from triptych.layers.stored.linears import finite

    outputs, inputs = shape
    exponents = tensors.read(kind, (outputs, inputs // GROUP), ("uint8", "float8_e8m0fnu"))
    return coded_weight(codes, finite(powers(exponents), tensors, kind), GROUP)
