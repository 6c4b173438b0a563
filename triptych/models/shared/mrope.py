"""Rope positions in three axes (M-RoPE, arXiv:2409.12191, section 2.1): temporal, height and width. Numpy only.

Text counts up by one on all three. A media item has positions of its own shape, counted from the position where it
starts; what follows it goes on a given distance after that. The reference is ``get_rope_index`` of each family in
transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import PlanMismatch
from triptych.models.base import Positions
from triptych.types import Span


@dataclass(frozen=True)
class Shape:
    """The positions of a run of media tokens, float64 of shape (3, tokens), counted from its start, and how far after
    its start the next token is."""

    offsets: NDArray[np.float64]
    advance: float


def grid_shape(frames: int, height: int, width: int, interval: float = 1.0) -> Shape:
    """A grid of so many frames, rows and columns of tokens, in that order. Frames are ``interval`` positions apart,
    rounded down; like the reference, what follows doesn't count them, only the longer side."""
    # in float32, as the reference
    times = np.floor(np.arange(frames, dtype=np.float32) * np.float32(interval))
    return Shape(_grid(times, height, width), max(height, width))


def timed_shape(times: NDArray[np.float64], height: int, width: int) -> Shape:
    """As ``grid_shape``, but frames are at these positions exactly, and what follows counts them."""
    offsets = _grid(times, height, width)
    return Shape(offsets, float(offsets.max()) + 1)


def _grid(times: NDArray[np.floating[Any]], height: int, width: int) -> NDArray[np.float64]:
    offsets = np.empty((3, len(times), height, width))
    offsets[0] = times[:, None, None]
    offsets[1] = np.arange(height)[:, None]
    offsets[2] = np.arange(width)
    return offsets.reshape(3, -1)


def line_shape(tokens: int) -> Shape:
    """So many tokens that count up by one on all three axes, as text does."""
    return Shape(np.tile(np.arange(tokens, dtype=np.float64), (3, 1)), tokens)


def interleaved_shapes(shapes: Sequence[Shape], runs: Sequence[tuple[int, int]]) -> list[Shape]:
    """Of shapes that begin at one position and whose tokens are interleaved: each run is so many of the next tokens of
    the shape of that number. Like the reference, what follows counts the last run only."""
    taken = [0] * len(shapes)
    made = []
    for number, tokens in runs:
        offsets = shapes[number].offsets[:, taken[number] : taken[number] + tokens]
        taken[number] += tokens
        made.append(Shape(offsets, 0.0))
    return [*made[:-1], Shape(made[-1].offsets, float(made[-1].offsets.max()) + 1)]


def mrope_positions(num_tokens: int, spans: Sequence[Span], shapes: Sequence[Shape]) -> Positions:
    """Positions of a prompt of ``num_tokens`` tokens in which ``shapes[i]`` occupies ``spans[i]``, in order.

    Generated tokens go on after the highest position of all. Raises PlanMismatch where a span's length isn't its
    shape's, or spans overlap or leave the prompt.
    """
    prompt = np.empty((3, num_tokens))
    token, position = 0, 0.0
    for span, shape in zip(spans, shapes, strict=True):
        rows = shape.offsets.shape[1]
        if span.length != rows or span.start < token or span.end > num_tokens:
            raise PlanMismatch(
                f"an item of {rows} rows can't be at tokens {span.start} to {span.end} "
                f"of a prompt of {num_tokens} whose first {token} are taken"
            )
        text = span.start - token
        prompt[:, token : span.start] = position + np.arange(text)
        position += text
        prompt[:, span.start : span.end] = shape.offsets + position
        position += shape.advance
        token = span.end
    prompt[:, token:] = position + np.arange(num_tokens - token)
    return Positions(prompt=prompt, next_position=float(prompt.max(initial=-1)) + 1)
