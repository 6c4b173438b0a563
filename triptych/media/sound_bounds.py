"""What sound may be like, whether a header says so or it is found out by decoding."""

from triptych.errors import UnsupportedMedia

MIN_RATE, MAX_RATE = 4_000, 384_000
MAX_CHANNELS = 8
"""More, and PyAV reads beyond what FFmpeg gives it."""

MAX_TRACK_SAMPLES = 10**9
"""Of all channels of a video's audio track, whose header doesn't say how many there are."""


def check_sound(rate: int, channels: int) -> None:
    """Raises UnsupportedMedia for so many samples a second, or channels."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UnsupportedMedia(f"the audio has {rate} samples per second; {MIN_RATE} to {MAX_RATE} are taken")
    if not 1 <= channels <= MAX_CHANNELS:
        raise UnsupportedMedia(f"the audio has {channels} channels; at most {MAX_CHANNELS} are taken")
