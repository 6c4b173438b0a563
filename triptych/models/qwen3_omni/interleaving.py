"""The order in which a video's frame embeddings and audio embeddings are interleaved. Ints and floats only.

The reference is ``replace_video_with_audio_token`` of ``Qwen3OmniMoeProcessor`` in transformers; tests check that they
agree.
"""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.types import PartRows


def interleaved_parts(times: NDArray[np.float64], frame_rows: int, windows: Sequence[int]) -> tuple[PartRows, ...]:
    """Return the parts of a video with an audio track, in the order of their first rows.

    Temporal patch ``i`` becomes ``frame_rows`` rows and precedes audio token ``ceil(times[i])``, or follows the last
    one if there are fewer. ``windows`` are the numbers of rows of the audio parts.
    """
    places: list[int] = np.minimum(np.ceil(times), sum(windows)).astype(int).tolist()
    parts = [PartRows(((number * frame_rows + place, frame_rows),)) for number, place in enumerate(places)]
    for first, end in itertools.pairwise(itertools.accumulate(windows, initial=0)):
        within = places[bisect.bisect_right(places, first) : bisect.bisect_left(places, end)]
        runs = tuple(
            (start + frame_rows * bisect.bisect_right(places, start), stop - start)
            for start, stop in itertools.pairwise((first, *dict.fromkeys(within), end))
        )
        parts.append(PartRows(runs, is_audio=True))
    return tuple(sorted(parts, key=lambda part: part.runs[0]))


def runs_by_modality(parts: Sequence[PartRows]) -> list[tuple[bool, int]]:
    """Return (whether it is audio, rows) of each maximal run of rows of one modality, in order."""
    runs = sorted((first_row, rows, part.is_audio) for part in parts for first_row, rows in part.runs)
    by_modality = itertools.groupby(runs, key=lambda run: run[2])
    return [(is_audio, sum(rows for _, rows, _ in group)) for is_audio, group in by_modality]
