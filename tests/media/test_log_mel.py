"""Features of clips that are padded with silence, against transformers'. Those that aren't: ``tests/models``."""

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from triptych.errors import CheckpointError, MediaTooLarge
from triptych.media.log_mel import LogMel

RATE, SECONDS = 16_000, 3
MEL = LogMel.from_config({"feature_size": 20, "chunk_length": SECONDS}, is_padded=True)
EXTRACTOR: Any = WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)


@pytest.mark.parametrize("samples", [400, 401, 479, 480, 481, 16_000, 16_159, 47_700, 47_999, 48_000])
@pytest.mark.parametrize("more", [0, 2])
def test_features_equal_the_reference(samples: int, more: int) -> None:
    clip = np.random.default_rng(samples).standard_normal(samples, np.float32) * np.float32(0.03)
    clip[-3:] = 1.0  # a click at the end is loudest in a frame that begins after it
    made = EXTRACTOR(clip, sampling_rate=RATE, padding="max_length", return_attention_mask=True)
    frames = int(made["attention_mask"].sum())
    assert MEL.num_frames(samples) == frames
    features = MEL(clip, more)
    assert len(features) == min(frames + more, 100 * SECONDS)
    np.testing.assert_allclose(features, made["input_features"][0].T[: len(features)], atol=1e-4)


def test_longer_clips_are_refused() -> None:
    """The reference's extractor would cut them without a word."""
    with pytest.raises(MediaTooLarge, match=r"3\.01 s long; the model takes at most 3 s"):
        MEL.num_frames(RATE * SECONDS + 100)


@pytest.mark.parametrize(
    ("settings", "message"), [({"chunk_length": 0}, "chunk_length must be"), ({"hop_length": 7}, "whole hops")]
)
def test_invalid_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LogMel.from_config({"feature_size": 20} | settings, is_padded=True)
