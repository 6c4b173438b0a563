"""Messages that arrive late, twice, in another order or never: what a channel receives, disturbed at random."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.messages.channel import Channel
from triptych.messages.codec import Message


@dataclass(frozen=True)
class Disorder:
    """Probability of each disturbance per message. At most one meets a message."""

    delay: float = 0.0
    """It arrives ``seconds`` later."""
    duplicate: float = 0.0
    """It arrives twice, the second time ``seconds`` later or at once."""
    reorder: float = 0.0
    """It arrives behind those that come within ``SWAP`` seconds."""
    seconds: float = 1.0
    seed: int = 0


SWAP = 0.02


@dataclass
class DisturbedChannel:
    """Replaces a channel's ``drain``. ``counts`` says what was disturbed, by the message's type."""

    channel: Channel
    disorder: Disorder
    counts: Counter[str] = field(default_factory=Counter)
    _late: list[tuple[float, int, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.disorder.seed)
        self._drain: Callable[[], list[Message]] = self.channel.drain
        self.channel.drain = self.drain  # type: ignore[method-assign]

    def drain(self) -> list[Message]:
        now = time.monotonic()
        messages = [found for message in self._drain() for found in self._disturbed(message, now)]
        due = sorted(late for late in self._late if late[0] <= now)
        self._late = [late for late in self._late if late[0] > now]
        return messages + [message for _, _, message in due]

    def restore(self) -> None:
        """Disturb nothing any more. What is late still comes."""
        self.disorder = Disorder()

    def _disturbed(self, message: Message, now: float) -> list[Message]:
        disorder, draw = self.disorder, self._random.random()
        for name in ("delay", "duplicate", "reorder"):
            draw -= getattr(disorder, name)
            if draw >= 0:
                continue
            self.counts[f"{name} {type(message).__name__}"] += 1
            if name == "duplicate" and self._random.random() < 0.5:
                return [message, message]
            self._hold(message, now, SWAP if name == "reorder" else disorder.seconds)
            return [message] if name == "duplicate" else []
        return [message]

    def _hold(self, message: Message, now: float, seconds: float) -> None:
        self._late.append((now + seconds, len(self._late), message))
        timer = threading.Timer(seconds + 0.001, self._wake)
        timer.daemon = True
        timer.start()

    def _wake(self) -> None:
        try:
            self.channel.wake()
        except OSError:  # the channel has been closed
            return


def disturb(channels: list[Channel], **settings: Any) -> list[DisturbedChannel]:
    """Disturb what each of the channels receives."""
    return [DisturbedChannel(channel, Disorder(seed=number, **settings)) for number, channel in enumerate(channels)]


@dataclass
class LossyChannel:
    """Loses a share of the messages of other processes, pings aside, before the channel has read their numbers."""

    channel: Channel
    share: float
    seed: int
    num_lost: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next: Callable[[], list[bytes]] = self.channel.next_frames
        self.channel.next_frames = self.next_frames  # type: ignore[method-assign]

    def next_frames(self) -> list[bytes]:
        while (frames := self._next()) and frames[-1] and self._random.random() < self.share:
            self.num_lost += 1
        return frames
