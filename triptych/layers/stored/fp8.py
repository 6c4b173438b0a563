"""Weights in 8-bit floating point with scales, of one tensor, of each output or of each block: as transformers' ``fp8``
stores them (files of Qwen, DeepSeek and Mistral), and as compressed-tensors does. Activations are not quantized."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import ONE, SCALE_DTYPES, LayerTensors, Section, require, shown

if TYPE_CHECKING:
    from triptych.layers.stored.linears import ScaledWeight

VALUES = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("weight_scale_inv", "weight_scale")
"""Last parts of the names of scales: floats [], [1], [out, 1], or one per block. All are multiplied by."""
EXPONENTS = ("uint8", "float8_e8m0fnu")
"""Dtypes of scales that are powers of 2."""


@dataclass(frozen=True)
class Fp8:
    """``StoredFormat`` of such checkpoints."""

    markers: ClassVar[tuple[str, ...]] = SCALES
    kept_as: ClassVar[str | None] = None
    method: str
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: a layer has one scale, or one for each output."""

    @classmethod
    def of(cls, section: Section) -> "list[Fp8]":
        """Return the formats that a config's section describes. Raises CheckpointError for settings that aren't
        served."""
        require(section, "fmt", (None, "e4m3", "e5m2"))
        return [cls(section["quant_method"], block_of(section, "weight_block_size"))]

    @classmethod
    def of_weights(cls, weights: Section) -> "Fp8":
        """Return the format that the ``weights`` of compressed-tensors describe. Raises CheckpointError for settings
        that aren't served."""
        for name, served in (
            ("num_bits", (8,)),
            ("type", ("float",)),
            ("strategy", ("tensor", "channel", "block")),
            ("symmetric", (True,)),
            ("dynamic", (False, None)),
        ):
            require(weights, name, served)
        return cls("float-quantized", block_of(weights, "block_structure"))

    @classmethod
    def of_groups(cls, weights: Section) -> "Fp8":
        """Return the format of ``mxfp8-quantized``, whose groups of inputs have scales that are powers of 2. Raises
        CheckpointError as ``of_weights`` does."""
        for name, served in (
            ("num_bits", (8,)),
            ("type", ("float",)),
            ("strategy", ("group",)),
            ("group_size", (32,)),
            ("symmetric", (True,)),
            ("dynamic", (False, None)),
        ):
            require(weights, name, served)
        return cls("mxfp8-quantized", (1, 32))

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        scales = "of a tensor or an output" if self.block is None else "of {} × {} weights".format(*self.block)
        return f"{self.method}, 8-bit floating point with scales {scales}"

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        is_fp8 = tensors.has("weight") and tensors.dtype("weight").startswith("F8")
        return is_fp8 and tensors.shape(_scales_of(tensors)) in self._blocks(shape)

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        import torch

        from triptych.layers.stored.float_codes import powers
        from triptych.layers.stored.linears import ScaledWeight, finite

        outputs, inputs = shape
        values = tensors.read("weight", shape, VALUES)
        kind, blocks = _scales_of(tensors), self._blocks(shape)
        found = tensors.shape(kind)
        stored = found if found in blocks else next(iter(blocks))
        block = blocks[stored]
        scales = tensors.read(kind, stored, (*SCALE_DTYPES, *EXPONENTS)).reshape(_grid(shape, block))
        scales = powers(scales) if str(scales.dtype).removeprefix("torch.") in EXPONENTS else scales
        return ScaledWeight(
            values,
            finite(scales, tensors, kind),
            None,
            torch.arange(outputs) // block[0],
            torch.arange(inputs) // block[1],
        )

    def _blocks(self, shape: tuple[int, int]) -> dict[tuple[int, ...], tuple[int, int]]:
        """Return the shapes that scales of a weight may have, and the outputs and inputs that share one then: first
        those that the config describes."""
        outputs, inputs = shape
        block = (1, inputs) if self.block is None else (min(self.block[0], outputs), min(self.block[1], inputs))
        rows, columns = _grid(shape, block)
        return {
            (rows, columns): block,
            (rows, 1, columns, 1): block,  # of ModelOpt
            (outputs,): (1, inputs),
            (outputs, 1): (1, inputs),
            **dict.fromkeys(ONE, shape),
        }


def _scales_of(tensors: LayerTensors) -> str:
    """Return the last part of the name of a layer's scales."""
    return next(kind for kind in SCALES if tensors.has(kind))


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks of a weight are below, and beside, each other."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def block_of(section: Section, name: str) -> tuple[int, int] | None:
    """Return the setting ``name``, the shape of a block. Raises CheckpointError if it is none."""
    match section.get(name):
        case None:
            return None
        case [int(outputs), int(inputs)] if type(outputs) is type(inputs) is int and min(outputs, inputs) > 0:
            return outputs, inputs
        case other:
            raise CheckpointError(
                f"config.json: {QUANTIZATION}: {name} must be two positive integers, not {shown(other)}"
            )
