"""Forms that give the seconds of a piece of work: sums of terms with coefficients that aren't negative, so that more
work never takes less time."""

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=64)]
NotNegative = Annotated[float, Meta(ge=0.0)]
MAX_TERMS = 64
MAX_FACTORS = 4


class Factor(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of a variable between two of its values: ``min(x, stop) - start``, at least 0."""

    variable: Name
    start: NotNegative = 0.0
    stop: NotNegative | None = None
    """None: no upper end."""

    def value(self, values: Mapping[str, float]) -> float:
        x = values[self.variable]
        return max(0.0, (x if self.stop is None else min(x, self.stop)) - self.start)


class Term(Struct, frozen=True, forbid_unknown_fields=True):
    """A coefficient times the product of its factors; a constant without any."""

    seconds: NotNegative
    factors: Annotated[tuple[Factor, ...], Meta(max_length=MAX_FACTORS)] = ()

    def value(self, values: Mapping[str, float]) -> float:
        return self.seconds * math.prod(factor.value(values) for factor in self.factors)

    def __str__(self) -> str:
        return " · ".join([f"{self.seconds:.3g} s", *map(_shown, self.factors)])


class Form(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds as a sum of terms."""

    terms: Annotated[tuple[Term, ...], Meta(max_length=MAX_TERMS)]

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(factor.variable for term in self.terms for factor in term.factors)

    def seconds(self, values: Mapping[str, float]) -> float:
        """Return the seconds for values of all variables; others are ignored. Raises KeyError for one that is
        missing."""
        return sum(term.value(values) for term in self.terms)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms)) or "0 s"


def _shown(factor: Factor) -> str:
    if factor.start == 0.0 and factor.stop is None:
        return factor.variable
    stop = "" if factor.stop is None else f"{factor.stop:g}"
    return f"{factor.variable}[{factor.start:g}:{stop}]"
