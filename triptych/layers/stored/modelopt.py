"""NVIDIA's ModelOpt (https://github.com/NVIDIA/Model-Optimizer), whose checkpoints are in FP8, NVFP4 or both."""

from collections.abc import Mapping

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import Section, StoredFormat, require, shown
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.nvfp4 import GROUP, ModelOptNvfp4

ALGORITHMS: Mapping[str, StoredFormat] = {
    "FP8": Fp8("FP8", None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8("FP8", None),
    "FP8_PB_WO": Fp8("FP8", (128, 128)),
    "MXFP8": Fp8("MXFP8", (1, 32)),
    "NVFP4": ModelOptNvfp4(),
}
"""By ``quant_algo``."""
MIXED = "MIXED_PRECISION"


def formats_of(section: Section) -> list[StoredFormat]:
    """Return the formats that a config's section describes. Raises CheckpointError for settings that aren't served."""
    if require(section, "quant_algo", (*ALGORITHMS, MIXED)) != MIXED:
        return [_format(section)]
    layers = section.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(one, Mapping) for one in layers.values()):
        raise CheckpointError(f"config.json: {QUANTIZATION}: quantized_layers must be objects, not {shown(layers)}")
    return list(dict.fromkeys(map(_format, layers.values())))


def _format(settings: Section) -> StoredFormat:
    algorithm = require(settings, "quant_algo", tuple(ALGORITHMS))
    if algorithm == "NVFP4":
        require(settings, "group_size", (None, GROUP))
    return ALGORITHMS[algorithm]
