"""The media of a request's messages: which there are, how many are allowed, and the bytes behind their URLs."""

import asyncio
from typing import Any

from triptych.api.schemas import ChatMessage, FramesPart, ImagePart, TextPart, VideoPart
from triptych.api.service import Service
from triptych.errors import InvalidRequest, MediaTooLarge, RequestError
from triptych.media.frames import PackedFrames, pack_frames
from triptych.prompt.media import MediaLimits, fetch
from triptych.prompt.prompt import media_param

MediaPart = ImagePart | VideoPart | FramesPart
Place = tuple[int, int]
"""The number of a message, and of a part within."""


def media_parts(messages: list[ChatMessage]) -> dict[Place, MediaPart]:
    """Every part whose bytes must be fetched."""
    return {
        (m, p): part
        for m, message in enumerate(messages)
        if not isinstance(message.content, str)
        for p, part in enumerate(message.content)
        if not isinstance(part, TextPart)
    }


def check_numbers(service: Service, parts: dict[Place, MediaPart]) -> None:
    """Raises InvalidRequest for more images or videos than are allowed."""
    images = sum(isinstance(part, ImagePart) for part in parts.values())
    limits = service.front_door
    for kind, number, most in (
        ("images", images, limits.max_images),
        ("videos", len(parts) - images, limits.max_videos),
    ):
        if number > most:
            raise InvalidRequest(f"{number} {kind}, at most {most} are allowed", "messages")


async def fetch_all(service: Service, parts: dict[Place, MediaPart]) -> dict[Place, dict[str, Any]]:
    """The parts as the prompt builder takes them: with the bytes of images and videos. Raises RequestError, naming the
    field."""
    fetched = await asyncio.gather(*(_fetch_part(service, place, part) for place, part in parts.items()))
    return dict(zip(parts, fetched, strict=True))


async def _fetch_part(service: Service, place: Place, part: MediaPart) -> dict[str, Any]:
    match part:
        case ImagePart(image_url=image):
            data = await _fetch(service, image.url, media_param(*place, "image"), service.media)
            return {"type": "image", "data": data}
        case VideoPart(video_url=video):
            data = await _fetch(service, video.url, media_param(*place, "video"), service.videos)
            return {"type": "video", "data": data}
        case FramesPart(video=urls, fps=rate):
            param = f"messages[{place[0]}].content[{place[1]}].video"
            frames = await asyncio.gather(
                *(_fetch(service, url, f"{param}[{number}]", service.media) for number, url in enumerate(urls))
            )
            if sum(map(len, frames)) > service.videos.max_bytes:
                raise MediaTooLarge(f"the video's frames are larger than {service.videos.max_bytes} bytes", param)
            return {"type": "video", "data": pack_frames(PackedFrames(rate, list(frames)))}


async def _fetch(service: Service, url: str, param: str, limits: MediaLimits) -> bytes:
    try:
        return await fetch(url, service.front_door.allowed_media_domains, limits)
    except RequestError as error:
        error.param = param
        raise
