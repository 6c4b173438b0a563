"""A set of CPU cores."""

import re
from dataclasses import dataclass

from triptych.errors import ConfigError

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class CpuSet:
    """Value of ``--cpus``."""

    cores: frozenset[int] = frozenset()
    """Their numbers; empty for no restriction."""

    @classmethod
    def parse(cls, text: str) -> "CpuSet":
        """Read the notation of taskset(1) and the kernel, ``0-3,8``. Raises ConfigError for anything else."""
        cores: set[int] = set()
        for part in text.split(",") if text.strip() else ():
            if (match := _RANGE.fullmatch(part.strip())) is None or int(match[1]) > int(match[2] or match[1]):
                raise ConfigError(f"{text!r} doesn't name cores, as 0-3,8 does")
            cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return cls(frozenset(cores))

    def __str__(self) -> str:
        starts = sorted(core for core in self.cores if core - 1 not in self.cores)
        ends = sorted(core for core in self.cores if core + 1 not in self.cores)
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
