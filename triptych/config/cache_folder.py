"""A folder for cached data, and how much it may take."""

from dataclasses import dataclass
from pathlib import Path

from triptych.config.memory_size import MemorySize
from triptych.errors import ConfigError


@dataclass(frozen=True)
class CacheFolder:
    """Value of ``--encode-cache-disk``."""

    path: str = ""
    """Absolute, since child processes run in another folder; empty for none."""
    num_bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> "CacheFolder":
        """Read a folder and an amount, such as ``/var/cache/triptych,20GiB``; nothing stands for none. Raises
        ConfigError for anything else."""
        if not text.strip():
            return cls()
        folder, comma, amount = text.rpartition(",")
        if not comma or not folder.strip():
            raise ConfigError(f"{text!r} doesn't name a folder and an amount, as /var/cache/triptych,20GiB does")
        size = MemorySize.parse(amount)
        if not size.num_bytes:
            raise ConfigError(f"{text!r} names a share; a folder needs an amount such as 20GiB")
        return cls(str(Path(folder.strip()).expanduser().absolute()), size.num_bytes)

    def __str__(self) -> str:
        return f"{self.path},{MemorySize(self.num_bytes)}" if self.path else ""
