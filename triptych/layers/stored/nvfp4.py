"""NVFP4: 4-bit floating point whose groups of 16 inputs have scales in 8-bit floating point, and whose tensors have one
more: as compressed-tensors stores it (``nvfp4-pack-quantized``), and as ModelOpt does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.layers.stored.format import ONE, LayerTensors, Section, require
from triptych.layers.stored.fp4 import PER_BYTE, check_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from triptych.layers.stored.linears import ScaledWeight

GROUP = 16
PACKED, SCALES, DIVISOR = "weight_packed", "weight_scale", "weight_global_scale"
"""Last parts of the names of a module's tensors, of compressed-tensors: uint8 [out, in / 2], the first of two inputs in
the lower bits; 8-bit floats [out, in / 16]; a float that scales are divided by."""
VALUES, FACTOR = "weight", "weight_scale_2"
"""Those of ModelOpt that differ: codes as in ``PACKED``; a float that scales are multiplied by."""
SCALE_KINDS = ("float8_e4m3fn",)


@dataclass(frozen=True)
class Nvfp4Packed:
    """``StoredFormat`` of a group of layers of compressed-tensors."""

    markers: ClassVar[tuple[str, ...]] = (PACKED,)
    kept_as: ClassVar[str | None] = None
    described: ClassVar[str] = "nvfp4-pack-quantized, 4-bit floating point in groups of 16"

    @classmethod
    def of_weights(cls, weights: Section) -> "Nvfp4Packed":
        """Return the format that the ``weights`` of compressed-tensors describe. Raises CheckpointError for settings
        that aren't served."""
        for name, served in (
            ("num_bits", (4,)),
            ("type", ("float",)),
            ("strategy", ("tensor_group",)),
            ("group_size", (GROUP,)),
            ("symmetric", (True,)),
            ("dynamic", (False, None)),
        ):
            require(weights, name, served)
        return cls()

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return tensors.has(DIVISOR)

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        return _weight(tensors, shape, PACKED, lambda scales: scales / _single(tensors, DIVISOR))


@dataclass(frozen=True)
class ModelOptNvfp4:
    """``StoredFormat`` of such layers of ModelOpt."""

    markers: ClassVar[tuple[str, ...]] = (FACTOR,)
    kept_as: ClassVar[str | None] = None
    described: ClassVar[str] = "NVFP4, 4-bit floating point in groups of 16"

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return tensors.has(FACTOR)

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        return _weight(tensors, shape, VALUES, lambda scales: scales * _single(tensors, FACTOR))


def _single(tensors: LayerTensors, kind: str) -> "Tensor":
    """Return a tensor of one value, float32 []. Raises CheckpointError, naming it, unless it is finite."""
    from triptych.layers.stored.linears import finite

    found = tensors.shape(kind)
    return finite(tensors.read(kind, found if found in ONE else (), ("float32",)).reshape(()), tensors, kind)


def _weight(
    tensors: LayerTensors, shape: tuple[int, int], kind: str, scaled: Callable[["Tensor"], "Tensor"]
) -> "ScaledWeight":
    """Return the weight of codes ``kind``; ``scaled`` applies the tensor's scale to those of groups."""
    from triptych.layers.stored.float_codes import coded_weight
    from triptych.layers.stored.linears import finite

    outputs, inputs = shape
    check_inputs(tensors, inputs, GROUP)
    codes = tensors.read(kind, (outputs, inputs // PER_BYTE), ("uint8",))
    scales = tensors.read(SCALES, (outputs, inputs // GROUP), SCALE_KINDS).float()
    return coded_weight(codes, finite(scaled(scales), tensors, SCALES), GROUP)
