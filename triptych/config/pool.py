"""Where a pool of embeddings is, and how much memory an instance lends it."""

import re
from dataclasses import dataclass

from triptych.config.memory_size import MemorySize
from triptych.errors import ConfigError

_ADDRESS = re.compile(r"mooncake://((?:[0-9A-Za-z._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5}))")


@dataclass(frozen=True)
class PoolAddress:
    """Value of ``--embedding-store``."""

    master: str = ""
    """``HOST:PORT`` of Mooncake's master; empty for no pool."""
    lent_bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> "PoolAddress":
        """Read an address and an amount, such as ``mooncake://10.0.0.5:50051,4GiB``; nothing stands for none. Raises
        ConfigError for anything else."""
        if not text.strip():
            return cls()
        address, comma, amount = text.strip().partition(",")
        found = _ADDRESS.fullmatch(address.strip())
        if found is None or not 0 < int(found[2]) < 2**16:
            raise ConfigError(f"{text!r} is not an address such as mooncake://10.0.0.5:50051 or, with memory, …,4GiB")
        lent = MemorySize.parse(amount) if comma else MemorySize(0)
        if comma and not lent.num_bytes:
            raise ConfigError(f"{text!r} names a share; a pool is lent an amount such as 4GiB")
        return cls(found[1], lent.num_bytes)

    def __str__(self) -> str:
        lent = f",{MemorySize(self.lent_bytes)}" if self.lent_bytes else ""
        return f"mooncake://{self.master}{lent}" if self.master else ""
