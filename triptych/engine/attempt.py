"""A step's work as it can be tried again in parts, until it is known which of its requests make the step fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk


@dataclass(frozen=True)
class Attempt:
    """Chunks to be computed in one forward pass, and the media rows that were taken for them: these can be taken from
    the receive buffer only once."""

    chunks: Sequence[Chunk]
    media: MediaEmbeddings

    def halves(self) -> list["Attempt"]:
        """The first half of the chunks and the second."""
        middle = len(self.chunks) // 2
        return [self._of(range(middle)), self._of(range(middle, len(self.chunks)))]

    def without(self, gone: Callable[[Chunk], bool]) -> "Attempt":
        """The chunks that are still to be computed."""
        kept = [number for number, chunk in enumerate(self.chunks) if not gone(chunk)]
        return self if len(kept) == len(self.chunks) else self._of(kept)

    def _of(self, numbers: Sequence[int]) -> "Attempt":
        chunks = [self.chunks[number] for number in numbers]
        starts = list(accumulate((chunk.length for chunk in self.chunks), initial=0))
        offsets = accumulate((chunk.length for chunk in chunks), initial=0)
        media = [
            self.media.of_tokens(starts[number], starts[number + 1], offset)
            for number, offset in zip(numbers, offsets, strict=False)
        ]
        return Attempt(chunks, MediaEmbeddings.joined([self.media.of_tokens(0, 0, 0), *media]))
