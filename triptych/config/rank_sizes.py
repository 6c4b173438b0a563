"""How many processes share the decoder of an instance."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from triptych.errors import ConfigError
from triptych.topology import Role

_SIZE = re.compile(r"[1-9]\d{0,3}", re.ASCII)


@dataclass(frozen=True)
class RankSizes:
    """Value of ``--tensor-parallel-size``."""

    everywhere: int = 1
    """Ranks of each instance that has a decoder, unless ``by_role`` names roles."""
    by_role: tuple[tuple[Role, int], ...] = ()
    """Ranks of the instances of each role; those of other roles are one process."""

    @classmethod
    def parse(cls, text: str) -> "RankSizes":
        """Read a number for all roles, as in 2, or one for each of some, as in P=2,D=1. Raises ConfigError."""
        if _SIZE.fullmatch(text):
            return cls(int(text))
        sizes: dict[Role, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            role = next((role for role in Role if role.has_decoder and role.value == name.upper()), None)
            if role is None or role in sizes or not _SIZE.fullmatch(size):
                raise ConfigError(
                    f"{text!r} is neither a number of processes nor one for each role that has a decoder, as in P=2,D=1"
                )
            sizes[role] = int(size)
        return cls(by_role=tuple(sizes.items()))

    @property
    def largest(self) -> int:
        """The most ranks that an instance may have."""
        return max((size for _, size in self.by_role), default=self.everywhere)

    def of(self, role: Role) -> int:
        """Return the number of processes of one instance of that role."""
        if not role.has_decoder:
            return 1
        return dict(self.by_role).get(role, 1) if self.by_role else self.everywhere

    def check(self, roles: Collection[Role]) -> None:
        """Raise ConfigError when a role is named that is none of these."""
        for role, _ in self.by_role:
            if role not in roles:
                known = ", ".join(sorted(set(roles)))
                raise ConfigError(f"--tensor-parallel-size {self} names {role}, but the topology has {known}")

    def __str__(self) -> str:
        return ",".join(f"{role}={size}" for role, size in self.by_role) or str(self.everywhere)
