"""Settings of the media that requests may have, and of where it may be fetched from."""

import ipaddress
from dataclasses import dataclass

from triptych.config.item_limits import ItemLimits
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

MAX_MESSAGE_BYTES = 256 * 2**20
"""Maximum size of a message between processes. The largest ones carry the log probabilities of long prompts."""
MAX_FILE_MB = 255
"""Maximum size of a media file, in MiB. An encode instance holds several files at a time."""
MAX_IMAGE_PIXELS = 50_000_000
"""More than decoders get memory for."""


@dataclass(frozen=True)
class MediaConfig(Settings):
    """Limits on media."""

    limit_mm_per_prompt: ItemLimits = setting(
        ItemLimits(),
        'media items in one request, by modality, as in image=16,video=2 or, in JSON, {"image": 16}; one that isn\'t '
        "named keeps its default",
        parse=ItemLimits.parse,
        also=("limit_mm_data_per_request",),
        common=True,
    )
    enable_mm_embeds: bool = setting(
        False,
        "take embeddings in place of images in chats, as /v1/encode gives them. These decide what the model sees, "
        "so clients should be trusted ones",
    )
    max_file_mb: int = setting(64, "largest file of one item, in MiB", ge=1, le=MAX_FILE_MB)
    max_image_pixels: int = setting(
        MAX_IMAGE_PIXELS,
        "pixels of one image, as stored; the images of one request together may have ten times as many",
        ge=1,
        le=MAX_IMAGE_PIXELS,
    )
    max_video_seconds: float = setting(3600.0, "maximum length of a video, in seconds", gt=0)
    max_video_gigapixels: float = setting(
        100.0,
        "maximum pixels (10^9) of all frames of one video, including frames that aren't sampled",
        gt=0,
        internal=True,
    )
    max_audio_seconds: float = setting(3600.0, "maximum length of an audio clip, in seconds", gt=0)
    max_audio_gigasamples: float = setting(
        1.0, "maximum samples (10^9) of one audio clip, over all channels", gt=0, internal=True
    )
    max_media_mb: int = setting(256, "media files of one request together, in MiB", ge=1)
    max_item_tokens: int = setting(16_384, "maximum tokens of one image, video or audio clip", ge=1)
    mm_uuid_cache_mb: int = setting(256, "cache for media that clients gave a uuid, in MiB", ge=0)

    @property
    def max_request_pixels(self) -> int:
        """Pixels of all images of one request together."""
        return 10 * self.max_image_pixels


@dataclass(frozen=True)
class MediaFetchConfig(Settings):
    """Fetching media."""

    allowed_media_domains: tuple[str, ...] = setting(
        (), "hosts that media may be fetched from, as HOST or HOST:PORT; none unless given", common=True
    )
    allowed_media_networks: tuple[str, ...] = setting(
        (), "address ranges off the public internet that those hosts may be in, such as 10.1.0.0/16"
    )
    allowed_local_media_path: str = setting(
        "", "folder whose files file: URLs may name; none unless given", path=True, common=True
    )
    media_fetch_timeout: float = setting(10.0, "seconds that fetching one media file may take", gt=0)

    @property
    def networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """``allowed_media_networks``, parsed. Raises ConfigError for one that isn't an address range."""
        found = []
        for network in self.allowed_media_networks:
            try:
                found.append(ipaddress.ip_network(network))
            except ValueError:
                raise ConfigError(f"--allowed-media-networks {network!r} is not a range such as 10.1.0.0/16") from None
        return found

    @property
    def fetches(self) -> bool:
        """Whether media may come from anywhere but the request itself."""
        return bool(self.allowed_media_domains or self.allowed_local_media_path)

    def check_together(self) -> None:
        _ = self.networks
