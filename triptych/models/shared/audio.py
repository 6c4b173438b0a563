"""Plans audio for towers that encode a clip in windows of log-mel features. Frontend; numpy only."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.errors import CheckpointError
from triptych.media.log_mel import LogMel
from triptych.models.base import AUDIO, ModelConfig
from triptych.models.shared.settings import setting
from triptych.types import AudioHeader, ItemPart, ItemPlan


class Window(NamedTuple):
    """Frames of features that become a part."""

    first: int
    """The first frame."""
    frames: int
    """Frames that the window's rows stand for."""
    given: int
    """Frames that the tower gets: those, and what follows them, or zeros."""


class AudioFeatures(Protocol):
    """Computes a clip's features; ``LogMel`` is one."""

    @property
    def rate(self) -> int:
        """Samples per second that it takes."""

    @property
    def num_bands(self) -> int:
        """Values of a frame."""

    def num_frames(self, samples: int) -> int:
        """Return the number of frames of ``samples`` samples. Raises BadMediaSize for too few, and MediaTooLarge for
        too many."""

    def __call__(self, samples: NDArray[np.float32], more: int = ...) -> NDArray[np.float32]:
        """Return float32 features of shape (frames, bands), and those of up to ``more`` frames of the silence that
        follows. Raises as ``num_frames`` does."""


class AudioFraming(Protocol):
    """How a family divides a clip."""

    @property
    def mel(self) -> AudioFeatures:
        """Computes the features, one frame per hop."""

    @property
    def more(self) -> int:
        """Frames after a clip's last that the tower needs."""

    def rows(self, frames: int) -> int:
        """Return the number of embeddings of a window of this many frames."""

    def windows(self, frames: int) -> Iterator[Window]:
        """Yield the windows of a clip of this many frames, each of which has rows. All but the last are equal."""


def mel_of_tower(audio: ModelConfig, preprocessor_config: dict[str, Any], is_padded: bool = False) -> LogMel:
    """Return what computes the features for a tower of the settings ``audio_config``; ``is_padded`` is as of
    ``LogMel.from_config``. Raises CheckpointError for an invalid value, and if the processor's features aren't those
    that the tower takes."""
    bands = setting(audio, "num_mel_bins", int, default=128)
    mel = LogMel.from_config({"feature_size": bands} | preprocessor_config, is_padded)
    if mel.num_bands != bands:
        raise CheckpointError(
            f"preprocessor_config.json: feature_size is {mel.num_bands}, but audio_config.num_mel_bins of config.json "
            f"is {bands}"
        )
    return mel


def plan_audio(header: AudioHeader, framing: AudioFraming, cost: Callable[[int], float]) -> ItemPlan:
    """Plan a part for each window. Its payload is the window's first frame of features and number of frames.

    ``cost`` returns the work of a window by its number of frames. Raises BadMediaSize and MediaTooLarge as ``LogMel``
    does.
    """
    frames = framing.mel.num_frames(header.resampled(framing.mel.rate))
    windows = list(framing.windows(frames))
    lengths = {window.frames for window in windows}
    costs, rows = {length: cost(length) for length in lengths}, {length: framing.rows(length) for length in lengths}
    first_rows = rows[windows[0].frames]
    parts = tuple(
        ItemPart(((number * first_rows, rows[length]),), length, costs[length], AUDIO, (first, length))
        for number, (first, length, _) in enumerate(windows)
    )
    return ItemPlan(
        modality="audio",
        header=header,
        resized_height=0,
        resized_width=0,
        grid=(frames, 1, 1),
        rows=sum(part.rows for part in parts),
        patches=sum(part.patches for part in parts),
        cost=sum(part.cost for part in parts),
        parts=parts,
    )
