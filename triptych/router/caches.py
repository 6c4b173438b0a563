"""What this frontend knows of the instances' caches, from the work that it gave them, and of encoder caches from their
heartbeats. Holds no socket.

An instance that has left holds nothing, since its lease is gone; one that restarts gets a new lease. What instances
evict is not known: a wrong guess costs work, never a wrong answer.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from blake3 import blake3

from triptych.messages.identity import kept_name

if TYPE_CHECKING:  # instances have leases, too, and prepare no prompts
    from triptych.prompt.prompt import PlannedItem

PREFIX_STEP = 16
"""Tokens between the first hashed prefixes of a prompt."""
STEPS_PER_DOUBLING = 16
"""Prefixes hashed between a length and twice that length, so that long prompts have few: about 6 % apart."""
MAX_PREFIXES = 2**16
"""Prefixes that are remembered."""
SHARED_BY = 4
"""A prefix that this many different prompts continue, such as a system prompt, is worth having in every cache."""

L = TypeVar("L")


PartName = bytes
"""Names the rows of an item's part at any encode instance (``kept_name``)."""


def part_names(key: str, salt: str, parts: Iterable[int]) -> list[PartName]:
    """Return the names of some parts of an item."""
    return [kept_name(key, salt, number) for number in parts]


class EncodedItems:
    """Parts in one instance's encoder cache: those that it has encoded, or has said that it keeps, and of which no
    encoding has failed since. Least recently used ones are evicted.

    Names determine a part's rows."""

    def __init__(self) -> None:
        self._num_bytes: OrderedDict[Hashable, int] = OrderedDict()
        self._total = 0

    def add(self, name: Hashable, num_bytes: int, max_bytes: int) -> None:
        """Note that a part of ``num_bytes`` was used. The cache has ``max_bytes``."""
        self.discard(name)
        self._num_bytes[name] = num_bytes
        self._total += num_bytes
        while self._total > max_bytes:
            _, evicted = self._num_bytes.popitem(last=False)
            self._total -= evicted

    def discard(self, name: Hashable) -> None:
        """Note that a part isn't there."""
        self._total -= self._num_bytes.pop(name, 0)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._num_bytes

    def __len__(self) -> int:
        return len(self._num_bytes)


def prefix_hashes(tokens: Sequence[int], items: Sequence["PlannedItem"], salt: str, lora: str = "") -> list[bytes]:
    """Return the hashes of some of a prompt's prefixes, shortest first: each covers the salt, the LoRA, the tokens and
    the items that begin in it. Empty for a prompt of fewer than ``PREFIX_STEP`` tokens.

    Lengths depend on nothing else, so that prompts with a common prefix have its hashes in common. There are at most
    ``STEPS_PER_DOUBLING`` for each doubling of the length, beside the first 32."""
    data, hashes = memoryview(array("q", tokens)).cast("B"), []
    waiting = sorted(items, key=lambda item: item.placement.start, reverse=True)
    previous, start = salt.encode() + (f"\0{lora}".encode() if lora else b""), 0
    while (end := start + max(PREFIX_STEP, (1 << start.bit_length()) // (2 * STEPS_PER_DOUBLING))) <= len(tokens):
        digest = blake3(previous)
        digest.update(data[8 * start : 8 * end])
        while waiting and waiting[-1].placement.start < end:
            digest.update(waiting.pop().key.encode())
        hashes.append(previous := digest.digest(16))
        start = end
    return hashes


@dataclass
class _Prefix(Generic[L]):
    instance: L
    """The instance that was given it last."""
    continuations: int = 0
    """Longer prefixes that were seen after it."""


@dataclass(frozen=True)
class Affinity(Generic[L]):
    """Where a prompt's cached pages may be."""

    key: bytes
    """Hash of the shortest prefix that few prompts share. All turns of a chat have the same one; empty for a prompt
    that is too short."""
    holder: L | None
    """The instance that was last given the prompt's longest known prefix; None if none is known, or many share it."""


class PrefixIndex(Generic[L]):
    """Remembers the prefixes of prompts by their hashes, and the instance that each was given last. Bounded; the least
    recently used are forgotten."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[bytes, _Prefix[L]] = OrderedDict()

    def find(self, hashes: Sequence[bytes]) -> Affinity[L]:
        """Return where a prompt with these ``prefix_hashes`` may find cached pages."""
        holder = None
        for index in reversed(range(len(hashes))):
            if (known := self._prefixes.get(hashes[index])) is None:
                continue
            if known.continuations >= SHARED_BY:
                return Affinity(hashes[min(index + 1, len(hashes) - 1)], holder)
            holder = holder or known.instance
        return Affinity(hashes[0] if hashes else b"", holder)

    def add(self, hashes: Sequence[bytes], instance: L) -> None:
        """Note that a prompt with these hashes was given to an instance."""
        before: _Prefix[L] | None = None
        for digest in hashes:
            if (known := self._prefixes.get(digest)) is None:
                known = self._prefixes[digest] = _Prefix(instance)
                if before is not None:
                    before.continuations += 1
            known.instance = instance
            self._prefixes.move_to_end(digest)
            before = known
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)

    def __len__(self) -> int:
        return len(self._prefixes)
