"""The work of one forward pass, which can be split and retried to find the requests that make it fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk


@dataclass(frozen=True)
class StepBatch:
    """Chunks to compute in one forward pass, with their media embeddings, which can be read from the receive pool only
    once."""

    chunks: Sequence[Chunk]
    media: MediaEmbeddings

    def halves(self) -> list["StepBatch"]:
        """Return the first and the second half of the chunks."""
        middle = len(self.chunks) // 2
        return [self._of(range(middle)), self._of(range(middle, len(self.chunks)))]

    def without(self, gone: Callable[[Chunk], bool]) -> "StepBatch":
        """Return the chunks for which ``gone`` is false."""
        kept = [number for number, chunk in enumerate(self.chunks) if not gone(chunk)]
        return self if len(kept) == len(self.chunks) else self._of(kept)

    def _of(self, numbers: Sequence[int]) -> "StepBatch":
        chunks = [self.chunks[number] for number in numbers]
        starts = list(accumulate((chunk.length for chunk in self.chunks), initial=0))
        offsets = accumulate((chunk.length for chunk in chunks), initial=0)
        media = [
            self.media.slice_tokens(starts[number], starts[number + 1], offset)
            for number, offset in zip(numbers, offsets, strict=False)
        ]
        return StepBatch(chunks, MediaEmbeddings.joined([self.media.slice_tokens(0, 0, 0), *media]))
