"""Rope positions in three axes (M-RoPE, arXiv:2409.12191, section 2.1): temporal, height and width. Numpy only.

Text positions increase by one on all three axes. A media item has positions relative to where it starts, and a given
distance from there to the token that follows it. The reference is ``get_rope_index`` of each family in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import PlanMismatch
from triptych.models.base import Positions
from triptych.types import Placement, Span


@dataclass(frozen=True)
class MediaPositions:
    """Positions of a contiguous run of media tokens."""

    offsets: NDArray[np.float64]
    """float64 [3, tokens], relative to the position where the run starts."""
    advance: float
    """Distance from the start of the run to the position of the next token."""


def grid_positions(frames: int, height: int, width: int, interval: float = 1.0) -> MediaPositions:
    """Return the positions of a grid of tokens: frames, rows, columns, in that order.

    Frames are ``interval`` positions apart, rounded down. As in the reference, ``advance`` is the longer side, whatever
    the number of frames.
    """
    # in float32, like the reference
    times = np.floor(np.arange(frames, dtype=np.float32) * np.float32(interval))
    return MediaPositions(_grid(times, height, width), max(height, width))


def timed_grid_positions(times: NDArray[np.float64], height: int, width: int) -> MediaPositions:
    """Return the positions of a grid whose frames are exactly at ``times``; ``advance`` includes the frames."""
    offsets = _grid(times, height, width)
    return MediaPositions(offsets, float(offsets.max()) + 1)


def _grid(times: NDArray[np.floating[Any]], height: int, width: int) -> NDArray[np.float64]:
    offsets = np.empty((3, len(times), height, width))
    offsets[0] = times[:, None, None]
    offsets[1] = np.arange(height)[:, None]
    offsets[2] = np.arange(width)
    return offsets.reshape(3, -1)


def sequential_positions(tokens: int) -> MediaPositions:
    """Return positions that increase by one on all three axes, as for text."""
    return MediaPositions(np.tile(np.arange(tokens, dtype=np.float64), (3, 1)), tokens)


def plain_positions(num_tokens: int, placements: Sequence[Placement], runs: Sequence[Sequence[int]]) -> Positions:
    """Return 0, 1, 2, … on all three axes, as for text, of a prompt whose item ``i`` has runs of ``runs[i]`` rows.

    Raises PlanMismatch as ``mrope_positions`` does, and if an item's runs aren't at as many places.
    """
    if [len(placement.spans) for placement in placements] != [len(rows) for rows in runs]:
        raise PlanMismatch(f"{sum(map(len, runs))} runs of rows of {len(runs)} items aren't at their places")
    spans = [span for placement in placements for span in placement.spans]
    return mrope_positions(num_tokens, spans, [sequential_positions(count) for rows in runs for count in rows])


def interleaved_positions(sources: Sequence[MediaPositions], runs: Sequence[tuple[int, int]]) -> list[MediaPositions]:
    """Split sources that start at the same position into interleaved runs.

    Each of ``runs`` is (index of a source, number of its next tokens). As in the reference, only the last run advances
    the position.
    """
    taken = [0] * len(sources)
    made = []
    for index, tokens in runs:
        offsets = sources[index].offsets[:, taken[index] : taken[index] + tokens]
        taken[index] += tokens
        made.append(MediaPositions(offsets, 0.0))
    return [*made[:-1], MediaPositions(made[-1].offsets, float(made[-1].offsets.max()) + 1)]


def mrope_positions(num_tokens: int, spans: Sequence[Span], media: Sequence[MediaPositions]) -> Positions:
    """Return the positions of a prompt of ``num_tokens`` tokens in which ``media[i]`` occupies ``spans[i]``, in order.

    Generated tokens continue after the highest position. Raises PlanMismatch if a span doesn't have the length of its
    run, or if spans overlap or extend beyond the prompt.
    """
    prompt = np.empty((3, num_tokens))
    token, position = 0, 0.0
    for span, run in zip(spans, media, strict=True):
        rows = run.offsets.shape[1]
        if span.length != rows or span.start < token or span.end > num_tokens:
            raise PlanMismatch(
                f"an item of {rows} rows can't be at tokens {span.start} to {span.end} "
                f"of a prompt of {num_tokens} whose first {token} are taken"
            )
        text = span.start - token
        prompt[:, token : span.start] = position + np.arange(text)
        position += text
        prompt[:, span.start : span.end] = run.offsets + position
        position += run.advance
        token = span.end
    prompt[:, token:] = position + np.arange(num_tokens - token)
    return Positions(prompt=prompt, next_position=float(prompt.max(initial=-1)) + 1)
