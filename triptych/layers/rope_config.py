"""Parameters of rotary position embeddings, without torch; ``rope`` computes them. Lengths are in tokens."""

from dataclasses import dataclass

from triptych.errors import CheckpointError


@dataclass(frozen=True)
class LinearScaling:
    """Divides all frequencies by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Divides low frequencies by ``factor``, with a smooth transition to high ones, which stay (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    """Frequencies with fewer turns than this in the original length are low."""
    high_freq_factor: float
    """Frequencies with more turns than this are high."""
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): divides low frequencies by ``factor``, with a linear transition to high ones."""

    factor: float
    original_length: int
    attention_factor: float
    """Factor of cosines and sines."""
    beta_fast: float = 32.0
    """Turns in the original length from which frequencies are high."""
    beta_slow: float = 1.0
    """Turns up to which frequencies are low."""
    truncate: bool = True
    """Whether the transition begins and ends at whole indices of frequencies."""


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor for each frequency, which depends on the request's length."""

    short_factors: tuple[float, ...]
    """For requests of which at most ``original_length`` tokens are computed, prompt and answer together."""
    long_factors: tuple[float, ...]
    """For longer requests."""
    original_length: int
    attention_factor: float
    """Factor of cosines and sines."""


@dataclass(frozen=True)
class ProportionalScaling:
    """The rotated part of a head is spread over the whole: exponents are those of an unscaled head, whose last
    frequencies are zero (Gemma 4)."""

    factor: float = 1.0
    """Divisor of all frequencies."""


@dataclass(frozen=True)
class DynamicScaling:
    """Frequencies of a larger base for requests of more than ``original_length`` tokens: the longer, the larger."""

    factor: float
    original_length: int


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling | DynamicScaling


LENGTH_AXIS = 1
"""The axis of positions that holds what ``LengthRule.of`` returns for a token's request, where frequencies depend on
that. Such embeddings have a single axis, the first."""


@dataclass(frozen=True)
class LengthRule:
    """How frequencies depend on a request's length: the tokens that are computed, of prompt and answer together."""

    short_length: int
    """Up to this length, all requests have the same frequencies."""
    each: bool
    """Whether each longer request has frequencies of its own length; if not, all have the same."""

    def of(self, length: int) -> int:
        """Return a number that is the same for requests with the same frequencies; 0 for short ones, and otherwise the
        length if that counts."""
        if length <= self.short_length:
            return 0
        return length if self.each else self.short_length + 1


@dataclass(frozen=True)
class RopeConfig:
    """A rotary position embedding. Heads without scaling have the frequencies ``theta ** (-2 i / rotated values)``."""

    theta: float
    """Base of the frequencies."""
    mrope_section: tuple[int, int, int] | None = None
    """Number of frequencies for the temporal, height and width axes (M-RoPE); None: all use the first axis."""
    interleaved: bool = False
    """Whether frequencies of the three axes alternate, instead of forming three sections."""
    partial: float = 1.0
    """Part of a head's values that is rotated: the first ones; 0: no positions (NoPE)."""
    pairs: bool = False
    """Whether each frequency rotates two neighbours (GPT-J), instead of a value of the first half and one of the
    second."""
    scaling: Scaling | None = None

    @property
    def length_rule(self) -> LengthRule | None:
        """How frequencies depend on a request's length; None: they don't."""
        match self.scaling:
            case LongRopeScaling(original_length=length):
                return LengthRule(length, each=False)
            case DynamicScaling(original_length=length):
                return LengthRule(length, each=True)
        return None

    def num_frequencies(self, head_dim: int) -> int:
        """Return how many frequencies rotate a head's values, two each. Raises CheckpointError for an odd number of
        values."""
        is_spread = isinstance(self.scaling, ProportionalScaling)
        rotated = int(self.partial * head_dim // 2) * 2 if is_spread else int(self.partial * head_dim)
        is_part = is_spread or not self.partial or 0 < rotated <= head_dim
        if rotated % 2 or head_dim % 2 or not is_part:
            raise CheckpointError(
                f"config.json: head_dim, qk_rope_head_dim or partial_rotary_factor: {rotated} of {head_dim} values of "
                "a head can't be rotated in pairs"
            )
        return rotated // 2

    def order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return which of a head's values, as checkpoints store them, stands where; None: all stand as stored.

        Queries and keys are reordered when they are loaded, so that every kind of embedding rotates value i with value
        i + head_dim / 2. Scores don't depend on the order, and values keep theirs.
        """
        count, half = self.num_frequencies(head_dim), head_dim // 2
        if isinstance(self.scaling, ProportionalScaling) or count == 0 or (count == half and not self.pairs):
            return None
        first, second, step = (0, 1, 2) if self.pairs else (0, count, 1)
        still = range(2 * count, head_dim)
        return (
            *range(first, first + step * count, step),
            *still[: half - count],
            *range(second, second + step * count, step),
            *still[half - count :],
        )


NO_POSITIONS = RopeConfig(theta=1.0, partial=0.0)
"""Leaves heads as they are (NoPE)."""
