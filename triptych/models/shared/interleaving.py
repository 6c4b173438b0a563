"""The order in which a video's frame embeddings and audio embeddings are interleaved. No torch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from triptych.models.base import AUDIO
from triptych.types import ItemPart


def interleaved_parts(
    order: Iterable[tuple[bool, int]], video: Sequence[ItemPart], audio: Sequence[ItemPart]
) -> tuple[ItemPart, ...]:
    """Return the parts of a video with an audio track, in the order of their first rows.

    ``video`` and ``audio`` are the parts of each by itself, whose rows follow each other. ``order`` yields (whether it
    is audio, number of its next rows), together all rows of both; runs may be empty.
    """
    parts: list[ItemPart] = []
    places: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    row = 0
    for is_audio, rows in order:
        if rows:
            places[is_audio].append((row, rows))
            row += rows
    for is_audio, own in ((False, video), (True, audio)):
        pieces = _cut(places[is_audio], [part.rows for part in own])
        parts += (
            ItemPart(runs, part.patches, part.cost, part.tower, part.payload)
            for part, runs in zip(own, pieces, strict=True)
        )
    return tuple(sorted(parts, key=lambda part: part.runs[0]))


def _cut(runs: Sequence[tuple[int, int]], counts: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the runs of each of several parts, which have ``counts`` rows of ``runs``, (first row, rows), in order.
    Runs of a part that follow each other are joined."""
    rest = iter(runs)
    first, left = 0, 0
    for count in counts:
        taken: list[tuple[int, int]] = []
        missing = count
        while missing:
            if not left:
                first, left = next(rest)
            rows = min(missing, left)
            if taken and sum(taken[-1]) == first:
                taken[-1] = taken[-1][0], taken[-1][1] + rows
            else:
                taken.append((first, rows))
            first, left, missing = first + rows, left - rows, missing - rows
        yield tuple(taken)


def runs_by_modality(parts: Sequence[ItemPart]) -> list[tuple[bool, int]]:
    """Return (whether it is audio, rows) of each maximal run of rows of one modality, in order."""
    runs = sorted((first_row, rows, part.tower == AUDIO) for part in parts for first_row, rows in part.runs)
    by_modality = itertools.groupby(runs, key=lambda run: run[2])
    return [(is_audio, sum(rows for _, rows, _ in group)) for is_audio, group in by_modality]
