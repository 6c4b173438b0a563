"""How the rows of a video's frames and of its sound stand among each other. Ints and floats only.

The reference is ``replace_video_with_audio_token`` of ``Qwen3OmniMoeProcessor`` in transformers; tests hold it equal.
"""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.types import PartRows


def interleaved(times: NDArray[np.float64], frame_rows: int, windows: Sequence[int]) -> tuple[PartRows, ...]:
    """The parts of a video that is heard, in the order of their first rows.

    ``times`` say, for each patch in time, which token of sound it belongs before, if that many there are; it becomes
    ``frame_rows`` rows. ``windows`` are the rows of each part of the sound.
    """
    places: list[int] = np.minimum(np.ceil(times), sum(windows)).astype(int).tolist()
    parts = [PartRows(((number * frame_rows + place, frame_rows),)) for number, place in enumerate(places)]
    for first, end in itertools.pairwise(itertools.accumulate(windows, initial=0)):
        within = places[bisect.bisect_right(places, first) : bisect.bisect_left(places, end)]
        runs = tuple(
            (start + frame_rows * bisect.bisect_right(places, start), stop - start)
            for start, stop in itertools.pairwise((first, *dict.fromkeys(within), end))
        )
        parts.append(PartRows(runs, audio=True))
    return tuple(sorted(parts, key=lambda part: part.runs[0]))


def runs_of_kinds(parts: Sequence[PartRows]) -> list[tuple[bool, int]]:
    """(whether it is heard, rows) of each run of rows of a kind, in order."""
    runs = sorted((first_row, rows, part.audio) for part in parts for first_row, rows in part.runs)
    return [
        (heard, sum(rows for _, rows, _ in alike)) for heard, alike in itertools.groupby(runs, key=lambda run: run[2])
    ]
