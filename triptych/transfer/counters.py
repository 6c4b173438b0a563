"""What the two ends of transfers count. Logged when an instance ends."""

from dataclasses import dataclass


@dataclass
class _Counters:
    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in vars(self).items())


@dataclass
class SenderCounters(_Counters):
    """What a sender has done so far. ``retries`` counts writes that failed and were tried again."""

    grants: int = 0
    bytes: int = 0
    retries: int = 0
    completed: int = 0
    aborted: int = 0


@dataclass
class ReceiverCounters(_Counters):
    """What a receiver has done so far. ``resumes`` counts grants that start beyond row 0, ``waits`` how often a
    transfer came up in line and found no free block, ``revoked`` how often landed rows were taken back for the head of
    the line, ``resent`` grants that were repeated because rows arrived garbled, ``fenced`` how often the buffer had to
    move."""

    grants: int = 0
    resumes: int = 0
    waits: int = 0
    revoked: int = 0
    resent: int = 0
    fenced: int = 0
    rows: int = 0
    bytes: int = 0
    completed: int = 0
