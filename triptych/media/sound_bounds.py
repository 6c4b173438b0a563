"""Limits on audio, applied to headers and to decoded frames."""

from triptych.errors import UnsupportedMedia

MIN_RATE, MAX_RATE = 4_000, 384_000
MAX_CHANNELS = 64
"""The most that FFmpeg converts."""

MAX_TRACK_SAMPLES = 10**9
"""Limit for a video's audio track over all channels, whose number its header doesn't declare."""


def check_sound(rate: int, channels: int) -> None:
    """Raise UnsupportedMedia for a sample rate or number of channels outside the limits."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UnsupportedMedia(f"the audio has {rate} samples per second; {MIN_RATE} to {MAX_RATE} are supported")
    if not 1 <= channels <= MAX_CHANNELS:
        raise UnsupportedMedia(f"the audio has {channels} channels; at most {MAX_CHANNELS} are supported")
