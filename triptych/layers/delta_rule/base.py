"""The interface between a decoder and a backend of the gated delta rule (arXiv:2412.06464), and the state they share.

A layer's channels are the queries of all key heads, then the keys, then the values of all value heads. Consecutive
value heads share a key head. Nothing here sums over heads, so a rank's heads are simply a layer with fewer heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from triptych.layers.pinned import to_device

KERNEL_SIZE = 4
"""Tokens that the convolution sees, including the current one."""
BLOCK = 32
"""A sequence's new tokens are processed in blocks of this many, from the first of them on; a block of one token like a
step of decode. So a prompt that is divided at multiples of it gives the same bits as a whole one."""
L2_EPS = 1e-6
"""Added to a head's sum of squares before queries and keys are divided by its root."""


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a layer, or of a rank's part of it. Raises ValueError if key heads don't divide value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Values of a query, and of a key."""
    value_dim: int

    def __post_init__(self) -> None:
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim) < 1:
            raise ValueError(f"{self} has none of something")
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads for {self.value_heads} value heads")

    @property
    def segments(self) -> tuple[int, int, int]:
        """Channels of queries, of keys and of values, in this order."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.segments)


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """A layer's parameters, besides its projections."""

    heads: DeltaHeads
    taps: Tensor
    """[4, channels] in the activations' dtype, contiguous: the convolution's weights, the oldest token's first."""
    rates: Tensor
    """float32 [value_heads]: the decay of a step is ``exp(-rate * softplus(a + dt_bias))``."""
    dt_bias: Tensor
    """float32 [value_heads]."""

    @classmethod
    def of(cls, heads: DeltaHeads, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> "DeltaWeights":
        """Make the operands from a checkpoint's tensors.

        ``conv`` [channels, 4] or [channels, 1, 4]; ``a_log``, the logarithm of rates, and ``dt_bias`` [value_heads].
        Raises ValueError for other shapes.
        """
        if conv.numel() != heads.channels * KERNEL_SIZE or conv.shape[0] != heads.channels:
            raise ValueError(f"a convolution of {heads.channels} channels has weights {list(conv.shape)}")
        if not a_log.shape == dt_bias.shape == (heads.value_heads,):
            raise ValueError(f"{heads.value_heads} value heads, but A_log {a_log.shape} and dt_bias {dt_bias.shape}")
        taps = conv.reshape(heads.channels, KERNEL_SIZE).T.contiguous()
        return cls(heads, taps, a_log.float().exp().contiguous(), dt_bias.float().contiguous())


@dataclass(frozen=True, eq=False)
class DeltaState:
    """A layer's state of each slot. Between slots there may be gaps, for example the heads of other ranks."""

    recurrent: Tensor
    """float32 [slots, value_heads, key_dim, value_dim]; a slot is contiguous. All columns of a head evolve apart from
    each other, and kernels read rows: a head's row is what one value of the key multiplies."""
    conv: Tensor
    """[slots, 3, channels] in the activations' dtype: the last three tokens' channels before the convolution, the
    oldest first; a token is contiguous."""

    @classmethod
    def allocate(cls, heads: DeltaHeads, slots: int, dtype: torch.dtype, device: torch.device) -> "DeltaState":
        """Allocate uninitialised slots: a sequence's first step ignores what is in its slot."""
        shape = slots, heads.value_heads, heads.key_dim, heads.value_dim
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((slots, KERNEL_SIZE - 1, heads.channels), dtype=dtype, device=device),
        )


@dataclass(frozen=True)
class DeltaTables:
    """Lengths and slots of a step's S sequences as kernels read them, all int64 and on one device."""

    starts: Tensor
    """[S]: index of each sequence's first token in the step."""
    lens: Tensor
    """[S]: new tokens of each sequence."""
    slots: Tensor
    """[S]: where each sequence's state is."""
    fresh: Tensor
    """[S]: 1 for a sequence whose state is zero, whatever its slot holds; else 0."""
    several: Tensor
    """[M]: indices of the sequences with several new tokens."""
    singles: Tensor
    """[N]: indices of the sequences whose last block is one token, which may be their only one."""

    @classmethod
    def on_cpu(cls, query_lens: Sequence[int], slots: Sequence[int], fresh: Sequence[bool]) -> "DeltaTables":
        """Build the tables from ``DeltaBatch``'s fields, in main memory."""
        several = [index for index, length in enumerate(query_lens) if length > 1]
        singles = [index for index, length in enumerate(query_lens) if length % BLOCK == 1]
        starts = [0, *accumulate(query_lens)][:-1]
        columns = starts, list(query_lens), list(slots), list(map(int, fresh)), several, singles
        return cls(*(torch.tensor(column, dtype=torch.int64) for column in columns))

    def tensors(self) -> list[Tensor]:
        """Return the fields in order, such that ``DeltaTables(*tables.tensors())`` equals ``tables``."""
        return [self.starts, self.lens, self.slots, self.fresh, self.several, self.singles]


@dataclass(frozen=True)
class DeltaBatch:
    """One step's packed tokens: T tokens of S sequences, each sequence's tokens contiguous and in order.

    Raises ValueError if the fields contradict each other, or two sequences have the same slot.
    """

    query_lens: list[int]
    """[S]: new tokens of each sequence, at least one, T in total."""
    slots: list[int]
    """[S]: the slot of each sequence's state."""
    fresh: list[bool]
    """[S]: whether a sequence begins with this step, from a state of zeros."""
    tables: DeltaTables | None = None
    """The same on the device, if it is there already; otherwise ``tables_on`` uploads it."""
    prepared: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A backend's own data about the batch, computed once for all layers."""

    def __post_init__(self) -> None:
        if not len(self.query_lens) == len(self.slots) == len(self.fresh):
            raise ValueError(f"{len(self.query_lens)} lengths, {len(self.slots)} slots, {len(self.fresh)} fresh")
        if min(self.query_lens, default=1) < 1:
            raise ValueError(f"a sequence without new tokens: {self.query_lens}")
        if len(set(self.slots)) < len(self.slots):
            raise ValueError(f"sequences share a slot: {self.slots}")

    def tables_on(self, device: torch.device) -> DeltaTables:
        """Return the tables on the step's device, uploaded once per step rather than once per layer."""
        if self.tables is not None:
            return self.tables
        if DeltaTables not in self.prepared:
            on_cpu = DeltaTables.on_cpu(self.query_lens, self.slots, self.fresh)
            self.prepared[DeltaTables] = DeltaTables(*to_device(on_cpu.tensors(), device))
        tables: DeltaTables = self.prepared[DeltaTables]
        return tables


class DeltaRule(Protocol):
    """The causal convolution of queries, keys and values, and the gated delta rule over them."""

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self, mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, state: DeltaState, batch: DeltaBatch
    ) -> Tensor:
        """Return each new token's output [T, value_heads, value_dim] in the dtype of ``mixed``, and update the state of
        the batch's slots in place.

        ``mixed`` [T, channels] are queries, keys and values before the convolution; ``a`` and ``b`` [T, value_heads]
        the logits of decays and of β. A token's values are contiguous; there may be gaps between tokens. Sums are
        float32.

        A token's output depends, to the bit, on its own sequence and its place in a block (``BLOCK``), but not on the
        rest of the step. Prompts that are divided differently have results that differ by rounding. Raises IndexError
        for a slot beyond the state.
        """


def check_slots(batch: DeltaBatch, state: DeltaState) -> None:
    """Raise IndexError if a sequence's slot doesn't exist."""
    if batch.slots and not (min(batch.slots) >= 0 and max(batch.slots) < len(state.recurrent)):
        raise IndexError(f"slots {batch.slots} of {len(state.recurrent)}")
