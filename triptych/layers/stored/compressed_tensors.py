"""compressed-tensors (https://github.com/vllm-project/compressed-tensors): groups of layers, each with a format."""

from collections.abc import Callable, Mapping

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import Section, StoredFormat, require, shown
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.int_quantized import IntQuantized
from triptych.layers.stored.mxfp4 import Mxfp4Packed
from triptych.layers.stored.nvfp4 import Nvfp4Packed
from triptych.layers.stored.pack_quantized import PackQuantized


def _of_type(weights: Section) -> StoredFormat:
    """Return the format of weights that are stored as what their type says."""
    return IntQuantized.of_weights(weights) if weights.get("type") == "int" else Fp8.of_weights(weights)


FORMATS: Mapping[str, Callable[[Section], StoredFormat]] = {
    "pack-quantized": PackQuantized.of,
    "float-quantized": Fp8.of_weights,
    "int-quantized": IntQuantized.of_weights,
    "naive-quantized": _of_type,
    "nvfp4-pack-quantized": Nvfp4Packed.of_weights,
    "mxfp4-pack-quantized": Mxfp4Packed.of_weights,
    "mxfp8-quantized": Fp8.of_groups,
}
"""By their names, what makes one of a group's ``weights``."""
MIXED = "mixed-precision"
"""The name for groups that have formats of their own."""


def formats_of(section: Section) -> list[StoredFormat]:
    """Return the formats that a config's section describes, the first group's first. Raises CheckpointError for
    settings that aren't served."""
    common = require(section, "format", (*FORMATS, MIXED))
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(one, Mapping) for one in groups.values()):
        raise CheckpointError(
            f"config.json: {QUANTIZATION}: config_groups must be objects by name, not {shown(groups)}"
        )
    found = []
    for group in groups.values():
        if not isinstance(weights := group.get("weights"), Mapping):
            raise CheckpointError(f"config.json: {QUANTIZATION}: weights must be an object, not {shown(weights)}")
        own = group if common == MIXED or group.get("format") is not None else section
        found.append(FORMATS[require(own, "format", tuple(FORMATS))](weights))
    return list(dict.fromkeys(found))
