"""The order in which a video's frame embeddings and audio embeddings are interleaved. Ints and floats only.

The reference is ``replace_video_with_audio_token`` of ``Qwen3OmniMoeProcessor`` in transformers; tests check that they
agree.
"""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.models.base import AUDIO
from triptych.types import ItemPart


def interleaved_parts(
    times: NDArray[np.float64], video: Sequence[ItemPart], audio: Sequence[ItemPart]
) -> tuple[ItemPart, ...]:
    """Return the parts of a video with an audio track, in the order of their first rows.

    ``video`` and ``audio`` are the parts of each by itself. Temporal patch ``i`` precedes audio token
    ``ceil(times[i])``, or follows the last one if there are fewer; all have equal numbers of rows.
    """
    frame_rows, windows = video[0].rows, [part.rows for part in audio]
    places: list[int] = np.minimum(np.ceil(times), sum(windows)).astype(int).tolist()
    parts = [
        _placed(part, ((number * frame_rows + place, frame_rows),))
        for number, (part, place) in enumerate(zip(video, places, strict=True))
    ]
    for part, (first, end) in zip(audio, itertools.pairwise(itertools.accumulate(windows, initial=0)), strict=True):
        within = places[bisect.bisect_right(places, first) : bisect.bisect_left(places, end)]
        runs = tuple(
            (start + frame_rows * bisect.bisect_right(places, start), stop - start)
            for start, stop in itertools.pairwise((first, *dict.fromkeys(within), end))
        )
        parts.append(_placed(part, runs))
    return tuple(sorted(parts, key=lambda part: part.runs[0]))


def _placed(part: ItemPart, runs: tuple[tuple[int, int], ...]) -> ItemPart:
    return ItemPart(runs, part.patches, part.cost, part.tower, part.payload)


def runs_by_modality(parts: Sequence[ItemPart]) -> list[tuple[bool, int]]:
    """Return (whether it is audio, rows) of each maximal run of rows of one modality, in order."""
    runs = sorted((first_row, rows, part.tower == AUDIO) for part in parts for first_row, rows in part.runs)
    by_modality = itertools.groupby(runs, key=lambda run: run[2])
    return [(is_audio, sum(rows for _, rows, _ in group)) for is_audio, group in by_modality]
