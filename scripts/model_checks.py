"""One check of models, as docs/models.md lists them."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What tests compare of some model types."""

    what: str
    """What is compared with the reference."""
    families: Collection[str]
    """Model types that the tests cover."""
    columns: tuple[str, ...]
    """Kinds of checks that these tests are."""
    in_ci: bool = True
    """Whether the tests are in every run, not in the slow suite alone."""
