"""GPTQ's format, version 1 and 2 (https://github.com/ModelCloud/GPTQModel)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError
from triptych.layers.stored.format import (
    SCALE_DTYPES,
    LayerTensors,
    Section,
    group_size,
    grouping,
    inputs_per_group,
    kept_integers,
    require,
    shown,
)

if TYPE_CHECKING:
    from triptych.layers.stored.linears import StoredLinear

WORDS, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
"""Last parts of the names of a quantized module's tensors: int32 [in * bits / 32, out]; int32 [groups, out * bits /
32]; floats [groups, out]; int32 [in], each input's group."""
VERSIONS = {None: None, "gptq": 1, "gptq_v2": 2}
"""By ``checkpoint_format`` or ``format``; 1 without either. In version 1, stored zero points are less by one."""


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
    def of(cls, section: Section) -> "list[Gptq]":
        """Return the formats that a config's section describes: one, and those that ``dynamic`` gives to some layers.
        Raises CheckpointError for settings that aren't served."""
        require(section, "format", list(VERSIONS))
        version = (
            VERSIONS[require(section, "checkpoint_format", list(VERSIONS))] or VERSIONS[section.get("format")] or 1
        )
        dynamic = section.get("dynamic") or {}
        if not isinstance(dynamic, Mapping) or not all(isinstance(one, Mapping) for one in dynamic.values()):
            raise CheckpointError(f"config.json: {QUANTIZATION}: dynamic must hold objects, not {shown(dynamic)}")
        settings = [section, *({**section, **one} for name, one in dynamic.items() if not name.startswith("-:"))]
        return list(dict.fromkeys(cls._with(one, version) for one in settings))

    @classmethod
    def _with(cls, settings: Section, version: int) -> "Gptq":
        bits, ordered = require(settings, "bits", (4, 8)), require(settings, "desc_act", (False, None, True))
        return cls(bits, group_size(settings), bool(ordered), version)

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return kept_integers(self.bits, self.group, is_ordered=self.is_ordered)

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        parts = [f"GPTQ version {self.version}, {self.bits} bits {grouping(self.group)}"]
        return ", ".join(parts + ["in any order"] * self.is_ordered)

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        outputs, inputs = shape
        groups = -(-inputs // inputs_per_group(self.group, inputs))
        expected = (-(-inputs * self.bits // 32), outputs), (groups, outputs)
        return (tensors.shape(WORDS), tensors.shape(SCALES)) == expected

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from triptych.layers.stored.integers import IntegerWeight, group_order, of_bits

        (outputs, inputs), per_word = shape, 32 // self.bits
        group = inputs_per_group(self.group, inputs)
        groups = -(-inputs // group)
        words = tensors.read(WORDS, (-(-inputs // per_word), outputs), ("int32",))
        stored_zeros = tensors.read(ZEROS, (groups, -(-outputs // per_word)), ("int32",))
        scales = tensors.read(SCALES, (groups, outputs), SCALE_DTYPES)
        zeros = of_bits(stored_zeros, self.bits)[:, :outputs].T.short() + (1 if self.version == 1 else 0)
        order = group_order(tensors, ORDER, inputs, group) if tensors.has(ORDER) else None
        weight = IntegerWeight(words.T.contiguous(), self.bits, scales.T, zeros, inputs, group, order)
        return weight.stored(tensors, SCALES)
