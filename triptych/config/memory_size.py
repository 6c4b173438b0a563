"""An amount of memory, or a share of what is free."""

import re
from dataclasses import dataclass

from triptych.errors import ConfigError

_UNITS = {"KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}
_BYTES = {unit.lower(): num_bytes for unit, num_bytes in _UNITS.items()}
_PLAIN = re.compile(r"\d{7,15}", re.ASCII)
_PATTERN = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?(%|{'|'.join(_UNITS)})", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class MemorySize:
    """Value of ``--kv-cache-memory``."""

    num_bytes: int = 0
    """The amount, or 0 for a share."""
    share: float = 0.0
    """The share of the free memory, from 0 to 1, or 0 for an amount."""

    @classmethod
    def parse(cls, text: str) -> "MemorySize":
        """Read an amount such as 8GiB or 500MB, or at least a million bytes as a number, or a share such as 25%. Raises
        ConfigError for anything else."""
        if _PLAIN.fullmatch(text.strip()) and int(text) > 0:
            return cls(int(text))
        if (match := _PATTERN.fullmatch(text.strip())) is None:
            raise ConfigError(f"{text!r} is neither an amount such as 8GiB or 500MB nor a share such as 25%")
        number, unit = float(match[1]), match[2].lower()
        size = cls(share=number / 100) if unit == "%" else cls(int(number * _BYTES[unit]))
        if size == cls() or size.share > 1:
            raise ConfigError(f"{text!r} is neither more than nothing nor at most 100%")
        return size

    def of(self, available: int) -> int:
        """Return the bytes that this is when ``available`` bytes are free."""
        return self.num_bytes or int(self.share * available)

    def divided_by(self, count: int) -> "MemorySize":
        """Return the size for each of ``count`` instances on one machine: an even part of a share, or the amount."""
        return self if self.num_bytes else MemorySize(share=self.share / count)

    def __str__(self) -> str:
        if not self.num_bytes:
            return f"{100 * self.share:.4g}%"
        for unit, num_bytes in sorted(_UNITS.items(), key=lambda entry: -entry[1]):
            if self.num_bytes % num_bytes == 0:
                return f"{self.num_bytes // num_bytes}{unit}"
        return f"{self.num_bytes} bytes"
