"""Weights in 8-bit floating point with scales, of one tensor, of each output or of each block: as transformers' ``fp8``
stores them (files of Qwen, DeepSeek and Mistral), and as compressed-tensors does. Activations are not quantized."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import SCALE_DTYPES, LayerTensors, Section, config_groups, require

if TYPE_CHECKING:
    from triptych.layers.stored.linears import ScaledWeight

VALUES = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("weight_scale_inv", "weight_scale")
"""Last parts of the names of scales: floats [], [1], [out, 1], or one per block. All are multiplied by."""
FLOATS = (*SCALE_DTYPES, "float8_e8m0fnu")
"""Dtypes of scales."""
UNUSED = ("input_scale", "activation_scale")
"""Last parts of the names of tensors that quantize activations."""


@dataclass(frozen=True)
class Fp8:
    """``StoredFormat`` of such checkpoints."""

    markers: ClassVar[tuple[str, ...]] = SCALES
    method: str
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: a layer has one scale, or one for each output."""

    @classmethod
    def of(cls, section: Section) -> "Fp8":
        """See ``StoredFormat``."""
        method: str = section["quant_method"]
        if method == "fp8":
            require(section, "fmt", (None, "e4m3", "e5m2"))
            return cls(method, _block(section, "weight_block_size"))
        require(section, "kv_cache_scheme", (None,))
        blocks = set()
        for weights in (group["weights"] for group in config_groups(section)):
            for name, served in (
                ("num_bits", (8,)),
                ("type", ("float",)),
                ("strategy", ("tensor", "channel", "block")),
                ("symmetric", (True,)),
                ("dynamic", (False, None)),
            ):
                require(weights, name, served)
            blocks.add(_block(weights, "block_structure"))
        if len(blocks) > 1:
            raise CheckpointError(f"config.json: {QUANTIZATION}: config_groups with different blocks aren't served")
        return cls(f"{method} {section['format']}", blocks.pop())

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return None

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        scales = "of a tensor or an output" if self.block is None else "of {} × {} weights".format(*self.block)
        return f"{self.method}, 8-bit floating point with scales {scales}"

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "ScaledWeight":
        """See ``StoredFormat``."""
        import torch

        from triptych.layers.stored.linears import ScaledWeight, finite

        for kind in UNUSED:
            if tensors.has(kind):
                tensors.read(kind, tensors.shape(kind))
        outputs, inputs = shape
        values = tensors.read("weight", shape, VALUES)
        kind = next(kind for kind in SCALES if tensors.has(kind))
        found, of_tensor, of_outputs = tensors.shape(kind), ((), (1,), (1, 1)), ((outputs,), (outputs, 1))
        if found in of_tensor:
            block = shape
        elif found in of_outputs or self.block is None:
            block = (1, inputs)
        else:
            block = min(self.block[0], outputs), min(self.block[1], inputs)
        grid = -(-outputs // block[0]), -(-inputs // block[1])
        scales = tensors.read(kind, found if found in (*of_tensor, *of_outputs) else grid, FLOATS)
        return ScaledWeight(
            values,
            finite(scales.reshape(grid), tensors, kind),
            None,
            torch.arange(outputs) // block[0],
            torch.arange(inputs) // block[1],
        )


def _block(section: Section, name: str) -> tuple[int, int] | None:
    """Return the setting ``name``, the shape of a block. Raises CheckpointError if it is none."""
    match section.get(name):
        case None:
            return None
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
        case other:
            raise CheckpointError(f"config.json: {QUANTIZATION}: {name} must be two positive integers, not {other!r}")
