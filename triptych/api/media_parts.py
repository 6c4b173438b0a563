"""The media of a request's messages: finding them, checking their number, fetching them, and their settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych.api.context import ApiContext
from triptych.api.generation import RequestContext
from triptych.api.given_rows import ROWS_FIELD, given_rows
from triptych.api.schemas import (
    FRAMES_PER_SECOND,
    AudioPart,
    AudioURL,
    Base64Image,
    ChatMessage,
    FramesPart,
    ImagePart,
    ImageRowsPart,
    ImageURL,
    InputAudio,
    InputAudioPart,
    TextualPart,
    UuidPart,
    VideoPart,
    VideoURL,
)
from triptych.api.uuid_cache import UuidMediaCache
from triptych.errors import InvalidRequest, MediaTooLarge, RequestError, UnknownMedia, UnsupportedMedia
from triptych.media.frames import PackedFrames, is_packed, pack_frames
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, SIZE_OPTIONS, ImageSize, Options
from triptych.prompt.media import together
from triptych.prompt.prompt import PLURALS, MediaPart, Modality, media_param
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    MODEL_SIZE,
    FrameSampling,
    OptionValue,
    PixelBounds,
    RequestedSize,
)

AUDIO_IN_VIDEO: Options = {"use_audio_in_video": bool}
"""The option of all models, which those without audio tracks refuse if it is true."""
SHARED_OPTIONS = (AREA_OPTIONS | SIZE_OPTIONS | FRAME_OPTIONS | AUDIO_IN_VIDEO).keys()
"""``mm_processor_kwargs`` that aren't a family's own."""
LOW_DETAIL_PIXELS = 512 * 512
"""Maximum area of an image with ``detail: low``, as in OpenAI's API."""

RequestPart = UuidPart | FramesPart | ImageRowsPart
MODALITIES: dict[type[RequestPart], Modality] = {
    ImagePart: "image",
    ImageRowsPart: "image",
    VideoPart: "video",
    FramesPart: "video",
    AudioPart: "audio",
    InputAudioPart: "audio",
}
MediaRef = ImageURL | VideoURL | AudioURL | InputAudio
PartIndex = tuple[int, int]
"""Indices of a message and of a part within it."""


@dataclass(frozen=True)
class MediaSettings:
    """A request's settings for processing its media; the model's own where the request has none."""

    bounds: PixelBounds = MODEL_BOUNDS
    """Bounds of the area that images and frames are resized to."""
    sampling: FrameSampling = MODEL_SAMPLING
    """Which frames of a video are used."""
    audio_in_video: bool = False
    """Whether a video's audio track is used."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Those that only some families have."""
    size: RequestedSize = MODEL_SIZE
    """What media are resized to, in place of ``bounds``."""

    @classmethod
    def from_options(cls, taken: Options, given: Mapping[str, Any] | None) -> "MediaSettings":
        """Read ``mm_processor_kwargs``, of which a model takes those in ``taken``. Raises InvalidRequest for another
        one, a value that it may not have, and options that exclude each other."""
        values = {name: _option(taken, name, value) for name, value in (given or {}).items() if value is not None}
        if FRAME_OPTIONS.keys() <= values.keys():
            raise InvalidRequest("fps and num_frames exclude each other", "mm_processor_kwargs.fps")
        size: ImageSize | None = values.get("size")
        if size and values.keys() & AREA_OPTIONS:
            raise InvalidRequest("size and min_pixels, max_pixels exclude each other", "mm_processor_kwargs.size")
        return cls(
            PixelBounds(values.get("min_pixels", 0), values.get("max_pixels", 0)),
            FrameSampling(values.get("fps", 0.0), values.get("num_frames", 0)),
            values.get("use_audio_in_video", False),
            {name: value for name, value in values.items() if name not in SHARED_OPTIONS},
            RequestedSize(size.shortest_edge or 0, size.longest_edge) if size else MODEL_SIZE,
        )

    def bounds_of(self, part: ImagePart, model_max_pixels: int) -> PixelBounds:
        """Return the bounds of an image: the request's own, or those of ``detail: low`` if the model's are larger.
        ``size`` is used in place of either."""
        is_low = part.image_url is not None and part.image_url.detail == "low"
        if not is_low or self.bounds.max_pixels or model_max_pixels <= LOW_DETAIL_PIXELS:
            return self.bounds
        return PixelBounds(self.bounds.min_pixels, LOW_DETAIL_PIXELS)


def media_parts(messages: list[ChatMessage]) -> dict[PartIndex, RequestPart]:
    """Return all parts that aren't text."""
    return {
        (m, p): part
        for m, message in enumerate(messages)
        if isinstance(message.content, list)
        for p, part in enumerate(message.content)
        if not isinstance(part, TextualPart)
    }


def _option(taken: Options, name: str, value: Any) -> Any:
    param = f"mm_processor_kwargs.{name}"
    if (kind := (taken | AUDIO_IN_VIDEO).get(name)) is None:
        raise InvalidRequest(f"the model doesn't take {name}; it takes {', '.join(sorted(taken)) or 'none'}", param)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param}: {error}", param) from error


def check_parts(api: ApiContext, parts: dict[PartIndex, RequestPart], settings: MediaSettings) -> None:
    """Raise InvalidRequest for too many items of a modality, or for audio_in_video with a model that lacks it.

    With audio_in_video, a video counts as an audio clip, too."""
    if settings.audio_in_video and not api.prompt_builder.audio_in_video:
        raise InvalidRequest("the model doesn't use the audio of videos", "mm_processor_kwargs.use_audio_in_video")
    limits = api.frontend.media.limit_mm_per_prompt
    numbers = Counter(MODALITIES[type(part)] for part in parts.values())
    if settings.audio_in_video:
        numbers["audio"] += numbers["video"]
    for modality, number in numbers.items():
        if number > (limit := limits.of(modality)):
            raise InvalidRequest(f"{number} {PLURALS[modality]}, at most {limit} are allowed", "messages")


async def fetch_all(
    api: ApiContext, parts: dict[PartIndex, RequestPart], settings: MediaSettings, context: RequestContext
) -> dict[PartIndex, MediaPart]:
    """Return the parts, with the bytes of their media, as the prompt builder takes them.

    Media with a uuid are cached within the context's scope. Raises RequestError, naming the field."""
    fetched = await together(_fetch_part(api, place, part, settings, context) for place, part in parts.items())
    context.media.check_all_used()
    return dict(zip(parts, fetched, strict=True))


async def _fetch_part(
    api: ApiContext, place: PartIndex, part: RequestPart, settings: MediaSettings, context: RequestContext
) -> MediaPart:
    if isinstance(part, ImageRowsPart):
        return await given_rows(api, media_param(*place, ROWS_FIELD), part, context)
    if isinstance(part, FramesPart):
        data = await _fetch_frames(place, part, context)
    else:
        data = await _fetch_or_recall(place, part, context, api.uuid_cache)
    fetched = MediaPart(type=MODALITIES[type(part)], data=data, field=_field(part))
    if fetched["type"] == "audio":
        return fetched
    fetched["size"], fetched["options"] = settings.size, settings.options
    if isinstance(part, ImagePart):
        fetched["bounds"] = settings.bounds_of(part, api.prompt_builder.planner.max_image_pixels)
    else:
        fetched["bounds"], fetched["sampling"] = settings.bounds, settings.sampling
        fetched["use_audio"] = settings.audio_in_video
    return fetched


def _field(part: RequestPart) -> str:
    """Return the field with the reference to a part's bytes."""
    return {FramesPart: "video", InputAudioPart: "input_audio.data"}.get(type(part), f"{part.type}.url")


def cache_name(modality: str, uuid: str) -> str:
    """Return the name of a file in the cache of media with a uuid."""
    return f"{modality}/{uuid}"


async def _fetch_or_recall(place: PartIndex, part: UuidPart, context: RequestContext, cache: UuidMediaCache) -> bytes:
    """Fetch the part's media and cache them if they have a uuid, or take them from the cache by their uuid."""
    ref: MediaRef | None = getattr(part, part.type)
    modality = MODALITIES[type(part)]
    name = cache_name(modality, part.uuid or "")
    if ref is not None:
        data = await _fetch(ref, media_param(*place, _field(part)), modality, context)
        if part.uuid is not None:
            cache.put(context.scope, name, data)
        return data
    if (cached := cache.get(context.scope, name)) is not None:
        return cached
    param = f"messages[{place[0]}].content[{place[1]}].uuid"
    raise UnknownMedia(f"no {modality} with uuid {part.uuid!r} is cached: send it again", param)


async def _fetch_frames(place: PartIndex, part: FramesPart, context: RequestContext) -> bytes:
    param = f"messages[{place[0]}].content[{place[1]}].video"
    refs = [ImageURL(url=url) for url in part.video]
    frames = await together(_fetch(ref, f"{param}[{n}]", "image", context) for n, ref in enumerate(refs))
    return _packed(frames, part.fps, context, param)


def _packed(frames: Sequence[bytes], fps: float, context: RequestContext, param: str | None = None) -> bytes:
    if sum(map(len, frames)) > (limit := context.media.limits.max_bytes):
        raise MediaTooLarge(f"the video's frames are larger than {limit} bytes", param)
    return pack_frames(PackedFrames(fps, list(frames)))


async def _fetch(ref: MediaRef, param: str, modality: str, context: RequestContext) -> bytes:
    try:
        if isinstance(ref, InputAudio):
            return await context.media.decode(ref.data)
        if isinstance(ref, Base64Image):
            return await context.media.decode(ref.url)
        if modality == "video" and (frames := await context.media.frames(ref.url)) is not None:
            return _packed(frames, FRAMES_PER_SECOND, context)
        data = await context.media.get(ref.url)
        if is_packed(data):
            raise UnsupportedMedia("not an image or a video, but this service's own format for a list of frames")
        return data
    except RequestError as error:
        error.param = param
        raise
