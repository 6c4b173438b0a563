"""bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes): 4 bits (``nf4``, ``fp4``) with scales of runs
of consecutive weights, and 8 bits (``LLM.int8()``) with scales of outputs."""

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from triptych.layers.stored.format import SCALE_DTYPES, LayerTensors, Section, is_one_of, require, shown

if TYPE_CHECKING:
    from torch import Tensor

    from triptych.layers.stored.linears import StoredLinear

WEIGHT, ABSMAX, LEVELS = "weight", "weight.absmax", "weight.quant_map"
"""Last parts of the names of a module's tensors in 4 bits: uint8 of ceil(out * in / 2) values, the first of two weights
in the higher bits; floats or, if they are quantized, uint8 [runs]; float32 [16]."""
NESTED_ABSMAX, NESTED_LEVELS = "weight.nested_absmax", "weight.nested_quant_map"
"""Those of ``ABSMAX`` that are quantized: float32 [runs of runs]; float32 [256]."""
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
"""uint8: a JSON object's text."""
LONGEST_STATE = 10_000
RUNS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
"""Weights that may share a scale; the library's default first."""
NESTED_RUN = 256
SCALES, LAYOUT = "SCB", "weight_format"
"""Those of a module in 8 bits: float32 [out], 127 times the scale of the output's weights; uint8 [], 0 for rows."""


@dataclass(frozen=True)
class Bits4:
    """``StoredFormat`` of 4 bits."""

    markers: ClassVar[tuple[str, ...]] = STATES
    kept_as: ClassVar[str | None] = None
    described: ClassVar[str] = "bitsandbytes, 4 bits"

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return True

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        import torch

        from triptych.layers.stored.linears import DenseWeight, ScaledWeight

        run, scales = _scales(tensors, shape)
        outputs, inputs = shape
        count, found = outputs * inputs, tensors.shape(WEIGHT)
        size = -(-count // 2)
        packed = tensors.read(WEIGHT, found if prod(found) == size else (size, 1), ("uint8",)).flatten()
        levels = tensors.read(LEVELS, (16,), ("float32",))
        if not levels.is_meta and not levels.isfinite().all():
            raise tensors.wrong(f"{LEVELS} has values that aren't finite")
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count]
        if inputs % run == 0:
            columns = torch.arange(inputs) // run
            return ScaledWeight(
                codes.view(shape), scales.view(outputs, -1), None, torch.arange(outputs), columns, levels
            )
        # runs go on in the next output
        full = torch.nn.functional.pad(codes, (0, -count % run)).view(-1, run)
        rows = ScaledWeight(full, scales[:, None], None, torch.arange(len(full)), torch.zeros(run).long(), levels)
        return DenseWeight(rows.dequantized().flatten()[:count].view(shape))


@dataclass(frozen=True)
class Bits8:
    """``StoredFormat`` of 8 bits."""

    markers: ClassVar[tuple[str, ...]] = (SCALES,)
    described: ClassVar[str] = "bitsandbytes, 8 bits by output"

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return "int8"

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return True

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from triptych.layers.stored.integers import scaled_int8

        values = tensors.read(WEIGHT, shape, ("int8",))
        if tensors.has(LAYOUT) and (found := tensors.read(LAYOUT, ()).item()) != 0:
            raise tensors.wrong(f"{LAYOUT} is {found}; 0, for rows, is served")
        scales = tensors.read(SCALES, shape[:1], ("float32",))[:, None] / 127
        return scaled_int8(values, scales, None, (tensors, SCALES, shape[1]))


def formats_of(section: Section) -> "list[Bits4 | Bits8]":
    """Return the formats that a config's section describes. Raises CheckpointError for settings that aren't served."""
    if require(section, "load_in_8bit", (True, False, None)):
        return [Bits8()]
    require(section, "load_in_4bit", (True,))
    require(section, "bnb_4bit_quant_storage", (None, "uint8"))
    return [Bits4()]


def _scales(tensors: LayerTensors, shape: tuple[int, int]) -> "tuple[int, Tensor]":
    """Return how many weights share a scale, and the scales, float32 [runs]. Raises CheckpointError for what isn't
    served."""
    from triptych.layers.stored.linears import finite

    kind = next(kind for kind in STATES if tensors.has(kind))
    run, offset = _state(tensors, kind, shape)
    runs = -(-prod(shape) // run)
    if not tensors.has(NESTED_ABSMAX):
        return run, finite(tensors.read(ABSMAX, (runs,), SCALE_DTYPES), tensors, ABSMAX)
    codes = tensors.read(ABSMAX, (runs,), ("uint8",))
    levels = tensors.read(NESTED_LEVELS, (256,), ("float32",))
    outer = tensors.read(NESTED_ABSMAX, (-(-runs // NESTED_RUN),), ("float32",)).to(codes.device)
    scales = levels[codes.int()] * outer.repeat_interleave(NESTED_RUN)[:runs] + offset
    return run, finite(scales, tensors, ABSMAX)


def _state(tensors: LayerTensors, kind: str, shape: tuple[int, int]) -> tuple[int, float]:
    """Return how many weights share a scale, and what is added to scales that are quantized, from the JSON object in
    the tensor ``kind``. Raises CheckpointError unless they are served and are of a weight of ``shape``."""
    found = tensors.shape(kind)
    if len(found) != 1 or found[0] > LONGEST_STATE:
        raise tensors.wrong(f"{kind} has shape {list(found)}; it must be a short text")
    text = tensors.read(kind, found, ("uint8",))
    if text.is_meta:  # an outline's, without values
        runs = tensors.shape(ABSMAX)
        return next((one for one in RUNS if runs == (-(-prod(shape) // one),)), RUNS[0]), 0.0
    try:
        state = json.loads(bytes(text.tolist()))
    except (ValueError, RecursionError):
        raise tensors.wrong(f"{kind} isn't valid JSON") from None
    if not isinstance(state, dict):
        raise tensors.wrong(f"{kind} must be a JSON object")
    for name, served in (
        ("blocksize", RUNS),
        ("shape", (list(shape),)),
        ("nested_blocksize", (NESTED_RUN,) if tensors.has(NESTED_ABSMAX) else (None, NESTED_RUN)),
    ):
        if not is_one_of(value := state.get(name), served):
            raise tensors.wrong(f"{kind}: {name} is {shown(value)}, not {' or '.join(map(str, served))}")
    offset = state.get("nested_offset", 0.0)
    if not isinstance(offset, float):
        raise tensors.wrong(f"{kind}: nested_offset is {shown(offset)}, not a number in floating point")
    return state["blocksize"], offset
