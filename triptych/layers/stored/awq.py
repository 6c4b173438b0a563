"""AWQ's format ``gemm`` (https://github.com/casper-hansen/AutoAWQ)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triptych.layers.stored.format import (
    SCALE_DTYPES,
    LayerTensors,
    Section,
    group_size,
    grouping,
    inputs_per_group,
    kept_integers,
    require,
)

if TYPE_CHECKING:
    from triptych.layers.stored.linears import StoredLinear

WORDS, ZEROS, SCALES = "qweight", "qzeros", "scales"
"""Last parts of the names of a quantized module's tensors: int32 [in, out / 8]; int32 [groups, out / 8]; floats
[groups, out]."""
PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which number of a word, counted from the lowest bits, is each output's."""


@dataclass(frozen=True)
class Awq:
    """``StoredFormat`` of such checkpoints."""

    markers: ClassVar[tuple[str, ...]] = (WORDS,)
    group: int | None
    """Inputs per group; None: all inputs of an output are one."""

    @classmethod
    def of(cls, section: Section) -> "list[Awq]":
        """Return the formats that a config's section describes. Raises CheckpointError for settings that aren't
        served."""
        for name in ("version", "format", "checkpoint_format"):  # as AutoAWQ, transformers and GPTQModel call it
            require(section, name, (None, "gemm", "GEMM"))
        require(section, "bits", (4,))
        require(section, "zero_point", (None, True))
        return [cls(group_size(section))]

    @property
    def kept_as(self) -> str | None:
        """See ``StoredFormat``."""
        return kept_integers(4, self.group)

    @property
    def described(self) -> str:
        """See ``StoredFormat``."""
        return f"AWQ gemm, 4 bits {grouping(self.group)}"

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """See ``StoredFormat``."""
        return True

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """See ``StoredFormat``."""
        from torch.nn import functional as F

        from triptych.layers.grouped_weight import packed, unpacked
        from triptych.layers.stored.integers import IntegerWeight

        outputs, inputs = shape
        if outputs % PER_WORD:
            raise tensors.wrong(f"{outputs} outputs don't fill words of {PER_WORD}")
        group = inputs_per_group(self.group, inputs)
        groups = -(-inputs // group)
        words = tensors.read(WORDS, (inputs, outputs // PER_WORD), ("int32",))
        zeros = tensors.read(ZEROS, (groups, outputs // PER_WORD), ("int32",))
        scales = tensors.read(SCALES, (groups, outputs), SCALE_DTYPES)
        # [n, out / 8] of words → [out, n] of numbers
        by_output, zeros = (
            unpacked(one).unflatten(1, (-1, PER_WORD))[:, :, list(PLACES)].flatten(1).T for one in (words, zeros)
        )
        repacked = packed(F.pad(by_output, (0, -inputs % PER_WORD)).contiguous())
        return IntegerWeight(repacked, 4, scales.T, zeros, inputs, group).stored(tensors, SCALES)
