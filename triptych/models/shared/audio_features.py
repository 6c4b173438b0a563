"""Turns audio into windows of log-mel features, as planned. Runs in encode workers; numpy only."""

from collections.abc import Iterator

import numpy as np
from blake3 import blake3

from triptych.errors import PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO, EncoderInput, Parts, chosen
from triptych.models.shared.audio import AudioFraming
from triptych.types import AudioHeader, ItemPlan


def audio_parts(
    data: bytes, plan: ItemPlan, header: AudioHeader, framing: AudioFraming, parts: Parts = None
) -> Iterator[EncoderInput]:
    """Yield those of the chosen parts that are a clip's, or of a video's audio track, that ``plan_audio`` has planned.

    A window's patches are its feature frames, float32 [frames, bands]; its grid counts those that its rows stand for.
    Computes all features first, because they are normalised by the clip's maximum. Raises MediaError if the bytes can't
    be decoded, and PlanMismatch if the windows aren't the planned ones.
    """
    mel = framing.mel
    windows = list(framing.windows(mel.num_frames(header.resampled(mel.rate))))
    planned = [number for number, part in enumerate(plan.parts) if part.tower == AUDIO]
    if [plan.parts[number].payload for number in planned] != [window[:2] for window in windows]:
        raise PlanMismatch("the plan divides audio into other windows than the model does")
    features = mel(decode_audio(data, header, mel.rate), framing.more)
    wanted = frozenset(chosen(plan, parts))
    for number, (first, length, given) in zip(planned, windows, strict=True):
        if number not in wanted:
            continue
        patches = np.zeros((given, mel.num_bands), dtype=np.float32)
        heard = features[first : first + given]
        patches[: len(heard)] = heard
        grid = length, 1, 1
        digest = blake3(np.array((*patches.shape, *grid)).tobytes())
        digest.update(patches.view(np.uint8).data)
        yield EncoderInput(patches=patches, grid=grid, name=digest.hexdigest(), tower=AUDIO)
