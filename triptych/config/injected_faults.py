"""Faults that an instance injects into its own work, for tests: what ``TransferConfig.inject_faults`` says."""

from dataclasses import dataclass, fields

from triptych.errors import ConfigError


@dataclass(frozen=True)
class InjectedFaults:
    """Probability of each fault. At most one is injected into a write."""

    drop: float = 0.0
    """Nothing is written, and the write reports that it is done."""
    delay: float = 0.0
    """The write completes ``seconds`` later."""
    duplicate: float = 0.0
    """Everything is written twice."""
    reorder: float = 0.0
    """The copies land one by one, in random order."""
    corrupt: float = 0.0
    """One byte is corrupted."""
    half: float = 0.0
    """Half of the bytes are written, then the write fails."""
    device: float | None = None
    """A job on the compute thread fails, and so does the device from then on. If it is given, if only as 0, SIGUSR1
    makes the next job do so."""
    hang: float = 0.0
    """Other than 0: a broken device doesn't answer at all when it is asked."""
    seconds: float = 1.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "InjectedFaults":
        """Parse ``drop=0.01,corrupt=0.05``; empty for none. Raises ConfigError for anything else."""
        known = {item.name: item.type for item in fields(cls)}
        values: dict[str, float] = {}
        for part in text.split(",") if text else ():
            name, _, value = part.strip().partition("=")
            try:
                if name not in known:
                    raise ValueError
                values[name] = int(value) if name == "seed" else float(value)
            except ValueError:
                raise ConfigError(f"faults {part!r}: write NAME=NUMBER, NAME one of {', '.join(known)}") from None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def probabilities(self) -> dict[str, float]:
        """The probabilities of faults of writes."""
        names = ("drop", "delay", "duplicate", "reorder", "corrupt", "half")
        return {name: getattr(self, name) for name in names}
