"""The formats of quantized checkpoints that are served, and which ones a checkpoint has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored import bitsandbytes, compressed_tensors, modelopt
from triptych.layers.stored.awq import Awq
from triptych.layers.stored.bitsandbytes import Bits4, Bits8
from triptych.layers.stored.format import LayerTensors, Section, StoredFormat, require, shown
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.gptq import Gptq
from triptych.layers.stored.int_quantized import IntQuantized
from triptych.layers.stored.mxfp4 import Mxfp4Blocks
from triptych.layers.stored.nvfp4 import ModelOptNvfp4
from triptych.layers.stored.pack_quantized import PackQuantized

METHODS: Mapping[str, Callable[[Section], Sequence[StoredFormat]]] = {
    "compressed-tensors": compressed_tensors.formats_of,
    "fp8": Fp8.of,
    "fbgemm_fp8": Fp8.of,
    "awq": Awq.of,
    "gptq": Gptq.of,
    "modelopt": modelopt.formats_of,
    "mxfp4": Mxfp4Blocks.of,
    "bitsandbytes": bitsandbytes.formats_of,
}
"""By ``quant_method``, what returns the formats that a config's section describes, or raises CheckpointError."""
REMEDY = (
    "serve the model's files that aren't quantized (with --quantization int8 or int4, if memory is short), or a copy "
    "in another format"
)
"""What can be done about a format that isn't served."""
MARKED: Sequence[type[StoredFormat]] = (PackQuantized, Fp8, IntQuantized, Awq, ModelOptNvfp4, Bits4, Bits8)
"""Formats whose markers show that a checkpoint's weights are quantized, whatever its config says."""


@dataclass(frozen=True)
class StoredFormats:
    """The formats of a checkpoint's quantized layers."""

    method: str
    formats: Sequence[StoredFormat]

    @property
    def markers(self) -> tuple[str, ...]:
        """Last parts of the names of tensors that only quantized layers have, one of them for each."""
        return _markers(self.formats)

    @property
    def kept_as(self) -> tuple[str, ...]:
        """The weight formats (``triptych.config.QUANTIZATIONS``) in which CPUs keep weights that aren't dequantized
        when they are loaded."""
        return tuple(dict.fromkeys(one.kept_as for one in self.formats if one.kept_as is not None))

    @property
    def has_dequantized(self) -> bool:
        """Whether CPUs dequantize some of the formats' weights when they are loaded."""
        return any(one.kept_as is None for one in self.formats)

    @property
    def described(self) -> str:
        """The formats in words, for people."""
        words = "; ".join(one.described for one in self.formats)
        return words if words.lower().startswith(self.method) else f"{self.method} {words}"

    def of_layer(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredFormat | None:
        """Return a layer's format, None if it isn't quantized; ``shape`` is its weight's, (out, in)."""
        marked = [one for one in self.formats if any(map(tensors.has, one.markers))]
        return next((one for one in marked if one.suits(tensors, shape)), next(iter(marked), None))


def described_formats(section: object) -> StoredFormats | None:
    """Return the formats that a config describes, whose ``config_files.quantization_section`` is given, or None. Raises
    CheckpointError for one that isn't served."""
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {QUANTIZATION} must be an object, not {shown(section)}")
    try:
        method = require(section, "quant_method", list(METHODS))
        return StoredFormats(method, METHODS[method](section))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {REMEDY}") from None


def read_formats(section: object, tensors: Iterable[str]) -> StoredFormats | None:
    """Return how a checkpoint's weights are stored, or None if they aren't quantized; ``section`` is its config's, and
    ``tensors`` are its tensors' names.

    Raises CheckpointError for a format that isn't served, and if config and tensors contradict each other.
    """
    found = described_formats(section)
    markers = _markers(MARKED) if found is None else found.markers
    ends = tuple(f".{marker}" for marker in markers)
    if found is not None:  # stacks' names
        ends += tuple(f"_proj_{marker.removeprefix('weight_')}" for marker in markers)
    marked = next((name for name in tensors if name.endswith(ends)), None)
    if found is None and marked is not None:
        raise CheckpointError(f"config.json has no {QUANTIZATION}, but the checkpoint has a tensor {marked!r}")
    if found is not None and marked is None:
        kinds = " or ".join(f"*.{marker}" for marker in markers)
        raise CheckpointError(
            f"config.json has a {QUANTIZATION} ({found.described}), but the checkpoint has no tensor {kinds}"
        )
    return found


def _markers(formats: Iterable[StoredFormat | type[StoredFormat]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(marker for one in formats for marker in one.markers))
