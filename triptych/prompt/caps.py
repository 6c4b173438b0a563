"""Limits on one request's media, checked against headers and plans before any pixel is decoded."""

from dataclasses import dataclass

from triptych.errors import MediaTooLarge
from triptych.types import AudioHeader, ImageHeader, ItemPlan, MediaHeader, VideoHeader


@dataclass(frozen=True)
class VideoLimits:
    """Limits on a video file, however few of its frames are sampled."""

    seconds: float = 3600.0
    gigapixels: float = 100.0
    """10^9 pixels, of all frames together, since all may have to be decoded."""

    def check(self, header: VideoHeader) -> None:
        """Raises MediaTooLarge."""
        if header.seconds > self.seconds:
            raise MediaTooLarge(f"the video takes {header.seconds:.1f} s; at most {self.seconds:g} are taken")
        gigapixels = header.frames * header.width * header.height / 1e9
        if gigapixels > self.gigapixels:
            raise MediaTooLarge(
                f"the video's {header.frames} frames of {header.width} by {header.height} pixels have {gigapixels:.1f} "
                f"gigapixels; at most {self.gigapixels:g} are taken"
            )


@dataclass(frozen=True)
class AudioLimits:
    """Limits on an audio file."""

    seconds: float = 3600.0
    gigasamples: float = 1.0
    """10^9 samples, of all channels together, since all are decoded."""

    def check(self, header: AudioHeader) -> None:
        """Raises MediaTooLarge."""
        if header.seconds > self.seconds:
            raise MediaTooLarge(f"the audio takes {header.seconds:.1f} s; at most {self.seconds:g} are taken")
        if header.in_video:
            return  # its number of samples is checked when it is decoded
        gigasamples = header.samples * header.channels / 1e9
        if gigasamples > self.gigasamples:
            raise MediaTooLarge(
                f"the audio's {header.channels} channels of {header.samples} samples have {gigasamples:.1f} "
                f"gigasamples; at most {self.gigasamples:g} are taken"
            )


@dataclass(frozen=True)
class MediaCaps:
    """Limits on the media of one request."""

    pixels: int = 50_000_000
    """Pixels of one image, as stored."""
    total_pixels: int = 500_000_000
    """Pixels of all images of a request."""
    tokens: int = 16_384
    """Tokens of one item."""
    video: VideoLimits = VideoLimits()
    audio: AudioLimits = AudioLimits()


class MediaBudget:
    """Adds up the media of one request, and checks it against the limits."""

    def __init__(self, caps: MediaCaps) -> None:
        self._caps = caps
        self._pixels = 0

    def add_header(self, header: MediaHeader) -> None:
        """Raises MediaTooLarge."""
        if isinstance(header, VideoHeader):
            self._caps.video.check(header)
        elif isinstance(header, AudioHeader):
            self._caps.audio.check(header)
        else:
            self._add_image(header)

    def _add_image(self, header: ImageHeader) -> None:
        pixels = header.width * header.height
        if pixels > self._caps.pixels:
            raise MediaTooLarge(
                f"the {header.format} image has {pixels} pixels ({header.width} by {header.height}); at most "
                f"{self._caps.pixels} are taken"
            )
        self._pixels += pixels
        if self._pixels > self._caps.total_pixels:
            raise MediaTooLarge(f"the images of this request have more than {self._caps.total_pixels} pixels together")

    def add_plan(self, plan: ItemPlan) -> None:
        """Raises MediaTooLarge."""
        if plan.rows > self._caps.tokens:
            raise MediaTooLarge(
                f"the {plan.modality} becomes {plan.rows} tokens; at most {self._caps.tokens} are taken"
            )
