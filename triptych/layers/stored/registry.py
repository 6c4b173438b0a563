"""The formats of quantized checkpoints that are served, and which one a checkpoint has."""

from collections.abc import Iterable, Mapping

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.awq import Awq
from triptych.layers.stored.compressed_tensors import PackQuantized
from triptych.layers.stored.format import StoredFormat, require
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.gptq import Gptq

FORMATS: Mapping[tuple[str, str | None], type[StoredFormat]] = {
    ("compressed-tensors", "pack-quantized"): PackQuantized,
    ("compressed-tensors", "float-quantized"): Fp8,
    ("compressed-tensors", "naive-quantized"): Fp8,
    ("fp8", None): Fp8,
    ("awq", None): Awq,
    ("gptq", None): Gptq,
}
"""By ``quant_method`` and, of methods with several formats, ``format``."""
MARKERS = frozenset(marker for one in FORMATS.values() for marker in one.markers)


def described_format(section: object) -> StoredFormat | None:
    """Return the format that a config describes, whose ``config_files.quantization_section`` is given, or None. Raises
    CheckpointError for one that isn't served."""
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {QUANTIZATION} must be an object, not {section!r}")
    method = require(section, "quant_method", list(dict.fromkeys(name for name, _ in FORMATS)))
    formats = [name for served, name in FORMATS if served == method]
    return FORMATS[method, None if None in formats else require(section, "format", formats)].of(section)


def read_format(section: object, tensors: Iterable[str]) -> StoredFormat | None:
    """Return how a checkpoint's weights are stored, or None if they aren't quantized; ``section`` is its config's, and
    ``tensors`` are its tensors' names.

    Raises CheckpointError for a format that isn't served, and if config and tensors contradict each other.
    """
    found = described_format(section)
    markers = MARKERS if found is None else found.markers
    marked = next((name for name in tensors if name.rpartition(".")[2] in markers), None)
    if found is None and marked is not None:
        raise CheckpointError(f"config.json has no {QUANTIZATION}, but the checkpoint has a tensor {marked!r}")
    if found is not None and marked is None:
        kinds = " or ".join(f"*.{marker}" for marker in markers)
        raise CheckpointError(
            f"config.json has a {QUANTIZATION} ({found.described}), but the checkpoint has no tensor {kinds}"
        )
    return found
