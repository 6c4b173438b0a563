"""GPTQ's format, version 1 and 2 (https://github.com/ModelCloud/GPTQModel)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import (
    SCALE_DTYPES,
    LayerTensors,
    Section,
    group_size,
    inputs_per_group,
    kept_in_4_bits,
    require,
)

if TYPE_CHECKING:
    from triptych.layers.stored.linears import StoredLinear

WORDS, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
"""Last parts of the names of a quantized module's tensors: int32 [in * bits / 32, out]; int32 [groups, out * bits /
32]; floats [groups, out]; int32 [in], each input's group."""
VERSIONS = {None: 1, "gptq": 1, "gptq_v2": 2}
"""By ``checkpoint_format``. In version 1, stored zero points are less by one."""


@dataclass(frozen=True)
class Gptq:
    """``StoredFormat`` of such checkpoints."""

    markers: ClassVar[tuple[str, ...]] = (WORDS,)
    bits: int
    group: int | None
    """Inputs per group; None: all inputs of an output are one."""
    is_ordered: bool
    """Whether any inputs may be a group."""
    version: int

    @classmethod
    def of(cls, section: Section) -> "Gptq":
        """See ``StoredFormat``."""
        version = VERSIONS[require(section, "checkpoint_format", list(VERSIONS))]
        bits, ordered = require(section, "bits", (4, 8)), require(section, "desc_act", (False, None, True))
        dynamic = section.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(key.startswith("-:") for key in dynamic):
            raise CheckpointError(f"config.json: {QUANTIZATION}: dynamic {dynamic!r} is not served; served: '-:' alone")
        return cls(bits, group_size(section), bool(ordered), version)

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return kept_in_4_bits(self.group) if self.bits == 4 and not self.is_ordered else None

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        groups = "by output" if self.group is None else f"in groups of {self.group}"
        return f"GPTQ version {self.version}, {self.bits} bits {groups}" + (", in any order" if self.is_ordered else "")

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from triptych.layers.stored.integers import IntegerWeight, group_order, of_bits

        (outputs, inputs), per_word = shape, 32 // self.bits
        if inputs % per_word or outputs % per_word:
            raise tensors.wrong(f"{outputs} outputs of {inputs} inputs don't fill words of {per_word}")
        group = inputs_per_group(self.group, inputs)
        groups = -(-inputs // group)
        words = tensors.read(WORDS, (inputs // per_word, outputs), ("int32",))
        stored_zeros = tensors.read(ZEROS, (groups, outputs // per_word), ("int32",))
        scales = tensors.read(SCALES, (groups, outputs), SCALE_DTYPES)
        zeros = of_bits(stored_zeros, self.bits).T.short() + (1 if self.version == 1 else 0)
        order = group_order(tensors, ORDER, inputs, group) if tensors.has(ORDER) else None
        weight = IntegerWeight(words.T.contiguous(), self.bits, scales.T, zeros, inputs, group, order)
        return weight.stored(tensors, SCALES)
