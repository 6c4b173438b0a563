"""The media of a request's messages: which there are, how many are allowed, their bytes, how they are to be seen."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from triptych.api.generation import RequestContext
from triptych.api.named_media import NamedMedia
from triptych.api.schemas import (
    AudioPart,
    AudioURL,
    ChatMessage,
    FramesPart,
    ImagePart,
    ImageURL,
    InputAudio,
    InputAudioPart,
    MediaOptions,
    NamedPart,
    VideoPart,
    VideoURL,
    WordsPart,
)
from triptych.api.service import Service
from triptych.errors import InvalidRequest, MediaTooLarge, RequestError, UnknownMedia, UnsupportedMedia
from triptych.media.frames import PackedFrames, is_packed, pack_frames
from triptych.prompt.media import together
from triptych.prompt.prompt import PLURALS, media_param
from triptych.types import MODEL_BOUNDS, MODEL_SAMPLING, FrameSampling, PixelBounds

LOW_DETAIL_PIXELS = 512 * 512
"""The area that ``detail: low`` bounds an image at, as in OpenAI's API."""

MediaPart = NamedPart | FramesPart
MODALITIES: dict[type[MediaPart], str] = {
    ImagePart: "image",
    VideoPart: "video",
    FramesPart: "video",
    AudioPart: "audio",
    InputAudioPart: "audio",
}
Link = ImageURL | VideoURL | AudioURL | InputAudio
Place = tuple[int, int]
"""The number of a message, and of a part within."""


@dataclass(frozen=True)
class View:
    """How a request wants its media to be seen, and whether videos shall be ``heard``; what it leaves open is the
    model's to say."""

    bounds: PixelBounds = MODEL_BOUNDS
    sampling: FrameSampling = MODEL_SAMPLING
    heard: bool = False

    @classmethod
    def of(cls, options: MediaOptions | None) -> "View":
        """Raises InvalidRequest for options that say the same twice."""
        if options is None:
            return cls()
        if options.fps is not None and options.num_frames is not None:
            raise InvalidRequest("fps and num_frames exclude each other", "mm_processor_kwargs.fps")
        if options.size and (options.min_pixels is not None or options.max_pixels is not None):
            raise InvalidRequest("size and min_pixels, max_pixels say the same twice", "mm_processor_kwargs.size")
        bounds = PixelBounds(options.min_pixels or 0, options.max_pixels or 0)
        if options.size:
            bounds = PixelBounds(options.size.shortest_edge, options.size.longest_edge)
        sampling = FrameSampling(options.fps or 0.0, options.num_frames or 0)
        return cls(bounds, sampling, heard=bool(options.use_audio_in_video))

    def bounds_of(self, part: ImagePart, own_most: int) -> PixelBounds:
        """A request's own bounds go before what ``detail`` says; ``own_most`` is the model's own largest area."""
        is_low = part.image_url is not None and part.image_url.detail == "low"
        if not is_low or self.bounds.max_pixels or own_most <= LOW_DETAIL_PIXELS:
            return self.bounds
        return PixelBounds(self.bounds.min_pixels, LOW_DETAIL_PIXELS)


def media_parts(messages: list[ChatMessage]) -> dict[Place, MediaPart]:
    """Every part that isn't words."""
    return {
        (m, p): part
        for m, message in enumerate(messages)
        if isinstance(message.content, list)
        for p, part in enumerate(message.content)
        if not isinstance(part, WordsPart)
    }


def check_parts(service: Service, parts: dict[Place, MediaPart], view: View) -> None:
    """Raises InvalidRequest for more items of a modality than are allowed, where a video that is heard is an audio
    clip, too, and for videos that shall be heard by a model that can't."""
    if view.heard and not service.prompt_builder.audio_in_video:
        raise InvalidRequest("the model doesn't hear videos", "mm_processor_kwargs.use_audio_in_video")
    limits = service.frontend.media.limit_mm_per_prompt
    numbers = Counter(MODALITIES[type(part)] for part in parts.values())
    if view.heard:
        numbers["audio"] += numbers["video"]
    for modality, number in numbers.items():
        if number > (most := limits.of(modality)):
            raise InvalidRequest(f"{number} {PLURALS[modality]}, at most {most} are allowed", "messages")


async def fetch_all(
    service: Service, parts: dict[Place, MediaPart], view: View, context: RequestContext
) -> dict[Place, dict[str, Any]]:
    """The parts as the prompt builder takes them: with the bytes of the media. What was named is remembered within the
    context's scope. Raises RequestError, naming the field."""
    fetched = await together(_fetch_part(service, place, part, view, context) for place, part in parts.items())
    context.media.check_all_used()
    return dict(zip(parts, fetched, strict=True))


async def _fetch_part(
    service: Service, place: Place, part: MediaPart, view: View, context: RequestContext
) -> dict[str, Any]:
    if isinstance(part, FramesPart):
        data = await _packed(place, part, context)
    else:
        data = await _named(place, part, context, service.named_media)
    fetched = {"type": MODALITIES[type(part)], "data": data, "field": _field(part)}
    if isinstance(part, ImagePart):
        return fetched | {"bounds": view.bounds_of(part, service.prompt_builder.planner.max_image_pixels)}
    if isinstance(part, VideoPart | FramesPart):
        return fetched | {"bounds": view.bounds, "sampling": view.sampling, "heard": view.heard}
    return fetched


def _field(part: MediaPart) -> str:
    """The field that a part's bytes come from."""
    return {FramesPart: "video", InputAudioPart: "input_audio.data"}.get(type(part), f"{part.type}.url")


async def _named(place: Place, part: NamedPart, context: RequestContext, known: NamedMedia) -> bytes:
    """What is behind the URL, remembered if it has a name; or what was remembered by that name."""
    link: Link | None = getattr(part, part.type)
    modality = MODALITIES[type(part)]
    name = f"{modality}/{part.uuid}"
    if link is not None:
        data = await _fetch(link, media_param(*place, _field(part)), modality, context)
        if part.uuid is not None:
            known.put(context.scope, name, data)
        return data
    if (remembered := known.get(context.scope, name)) is not None:
        return remembered
    param = f"messages[{place[0]}].content[{place[1]}].uuid"
    raise UnknownMedia(f"no {modality} is remembered as {part.uuid!r}: send it again", param)


async def _packed(place: Place, part: FramesPart, context: RequestContext) -> bytes:
    param = f"messages[{place[0]}].content[{place[1]}].video"
    links = [ImageURL(url=url) for url in part.video]
    frames = await together(_fetch(link, f"{param}[{n}]", "image", context) for n, link in enumerate(links))
    if sum(map(len, frames)) > (most := context.media.limits.max_video_bytes):
        raise MediaTooLarge(f"the video's frames are larger than {most} bytes", param)
    return pack_frames(PackedFrames(part.fps, list(frames)))


async def _fetch(link: Link, param: str, modality: str, context: RequestContext) -> bytes:
    try:
        if isinstance(link, InputAudio):
            return await context.media.decode(link.data, modality)
        data = await context.media.get(link.url, modality)
        if is_packed(data):
            raise UnsupportedMedia("not an image or a video, but what this service makes of a list of frames")
        return data
    except RequestError as error:
        error.param = param
        raise
