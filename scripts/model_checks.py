"""What one row of the tables of checks in docs/models says."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One row of a table of checks."""

    what: str
    """What is compared with the reference."""
    how: str
    """How closely, and on which cases."""
    file: str
    """Files or folders of the tests, separated by commas."""
    families: Collection[str]
    """Model types that the tests cover."""
    columns: tuple[str, ...] = ()
    """Columns of the tables of model types that the check ticks."""
    in_ci: bool = True
    """Whether the tests are in every run, not in the slow suite alone."""

    @property
    def files(self) -> str:
        """The files as Markdown."""
        return ", ".join(f"`{file}`" for file in self.file.split(", "))
