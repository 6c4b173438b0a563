"""What a format of quantized checkpoints has to say. A format is a file of this folder and a line in ``registry.py``.

A module ``M`` is quantized if the checkpoint has one of its format's tensors, such as ``M.weight_packed``. Lists of
names in configs don't decide that: they differ between the libraries that write them. No torch is imported before a
layer is read, because the supervisor and ``triptych doctor`` ask what a config means.
"""

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from triptych.checkpoint.config_files import QUANTIZATION
from triptych.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from triptych.layers.stored.linears import StoredLinear

Section = Mapping[str, Any]
KERNEL_GROUPS = (32, 64, 128)
"""Numbers of inputs that share a scale in the kernels for 4 bits."""
SCALE_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of the scales of integers, named as in PyTorch."""
ONE = ((), (1,), (1, 1))
"""Shapes of a single value."""
MOST_SHOWN = 200
"""Characters of a setting in messages."""
ACTIVATION_TENSORS = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
    *("input_scale_ub", "output_scale", "output_zero_point"),
)
"""Last parts of the names of tensors that quantize activations, which aren't quantized as the checkpoint says."""


class LayerTensors(Protocol):
    """A linear layer's tensors in a checkpoint, by the last parts of their names."""

    def has(self, kind: str) -> bool:
        """Return whether there is such a tensor."""

    def shape(self, kind: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises CheckpointError, naming it, if it is missing."""

    def dtype(self, kind: str) -> str:
        """Return a tensor's dtype as safetensors files name it (``F8_E4M3``). Raises CheckpointError, naming it, if it
        is missing."""

    def read(self, kind: str, shape: Sequence[int], dtypes: Sequence[str] = ()) -> "Tensor":
        """Return a tensor, memory-mapped. Raises CheckpointError, naming it, for one that is missing, has another shape
        or is of none of ``dtypes``, named as in PyTorch; empty: it may be of any."""

    def wrong(self, problem: str) -> CheckpointError:
        """Return an error that names the layer."""


class StoredFormat(Protocol):
    """How a checkpoint stores the weights of some quantized linear layers."""

    markers: ClassVar[tuple[str, ...]]
    """Last parts of the names of tensors that only quantized layers have, one of them for each."""

    @property
    def kept_as(self) -> str | None:
        """The weight format (``triptych.config.QUANTIZATIONS``) in which CPUs keep the weights, or None: they are
        dequantized when they are loaded."""

    @property
    def described(self) -> str:
        """The format in words, for people."""

    def suits(self, tensors: LayerTensors, shape: tuple[int, int]) -> bool:
        """Return whether a layer, which has one of ``markers``, is stored like this rather than as another format of
        its checkpoint has it."""

    def load(self, tensors: LayerTensors, shape: tuple[int, int]) -> "StoredLinear":
        """Return a quantized layer's weight of ``shape``, (out, in). Raises CheckpointError, naming the tensor, if one
        is missing, misshapen, or has values that aren't served."""


def is_one_of(value: object, served: Sequence[object]) -> bool:
    """Return whether a value from JSON is one of those that are served, of the same type: 64.0 isn't 64."""
    return any(type(value) is type(one) and value == one for one in served)


def require(section: Section, name: str, served: Sequence[object]) -> Any:
    """Return a setting of the config's section. Raises CheckpointError, naming it, if it has none of the values that
    are served."""
    value = section.get(name)
    if not is_one_of(value, served):
        options = ", ".join(map(repr, served))
        raise CheckpointError(f"config.json: {QUANTIZATION}: {name} {shown(value)} is not served; served: {options}")
    return value


def shown(value: object) -> str:
    """Return a setting as one short line, for messages."""
    short = Repr()
    short.maxlevel, short.maxdict, short.maxlist, short.maxstring, short.maxother = 3, 8, 8, 80, 80
    text = short.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def group_size(section: Section) -> int | None:
    """Return how many inputs share a scale, None for all of them. Raises CheckpointError for a setting that is none."""
    match section.get("group_size"):
        case -1 | None:
            return None
        case int(size) if type(size) is int and size > 0:
            return size
        case other:
            raise CheckpointError(
                f"config.json: {QUANTIZATION}: group_size must be a positive integer, not {shown(other)}"
            )


def inputs_per_group(group: int | None, inputs: int) -> int:
    """Return how many of a layer's inputs share a scale, which are at most all."""
    return inputs if group is None else min(group, inputs)


def kernel_group(group: int, inputs: int) -> int | None:
    """Return how many inputs share a scale in the kernels for 4 bits, for weights with groups of ``group``; None if the
    kernels can't have the same scales."""
    largest = next((one for one in reversed(KERNEL_GROUPS) if group % one == 0), None)
    return KERNEL_GROUPS[-1] if largest is None and group >= inputs else largest


def kept_integers(bits: int, group: int | None, *, is_ordered: bool = False, has_zeros: bool = False) -> str | None:
    """Return how CPUs keep weights with groups of that many inputs, None for all of them: consecutive ones, unless it
    ``is_ordered``."""
    if bits == 8:
        return "int8" if group is None and not has_zeros else None
    fits = group is None or kernel_group(group, group + 1)
    return "int4" if bits == 4 and fits and not is_ordered else None


def grouping(group: int | None) -> str:
    """Return the words for groups of that many inputs, None for all of them."""
    return "by output" if group is None else f"in groups of {group}"
