"""Videos over HTTP: answered, and refused with the field at fault when they can't be used."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.api.serving import Served, image, image_part, served, text_part
from tests.api.test_bad_input import the_error
from tests.media.clips import clip, sound_only

VIDEO = "messages[0].content[1].video_url.url"


def url_of(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(data)}}


def frames_part(*frames: bytes, **settings: Any) -> dict[str, Any]:
    return {"type": "video", "video": [url_of(frame, "image/png") for frame in frames], **settings}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("container", ["mp4", "webm", "gif"])
def test_a_video_is_answered(service: Served, container: str, stream: bool) -> None:
    response = service.post([text_part("x"), video_part(clip(container, frames=20))], stream=stream)
    assert response.status_code == 200, response.text


def test_the_prompt_has_the_rows_that_were_planned(service: Served) -> None:
    few, many = clip("mp4", frames=20), clip("mp4", frames=60)
    rows = [
        service.post([video_part(data), text_part("x")]).json()["usage"]["prompt_tokens"] for data in (few, few, many)
    ]
    assert rows[0] == rows[1] < rows[2]


def test_frames_are_a_video(service: Served) -> None:
    frames = [image(64, 64, seed) for seed in range(4)]
    slow = service.text([frames_part(*frames, fps=0.5), text_part("x")])
    assert slow == service.text([frames_part(*frames, fps=0.5), text_part("x")])
    response = service.post([frames_part(*frames, image()), text_part("x")])
    assert "same size" in the_error(response, 400, "messages[0].content[0].video_url.url", "bad_media_size")
    response = service.post([frames_part(image(), b"hello"), text_part("x")])
    the_error(response, 400, "messages[0].content[0].video_url.url", "unsupported_media")
    response = service.post([{"type": "video", "video": []}, text_part("x")])
    the_error(response, 400, "messages[0].content[0].video", "invalid_request")
    response = service.post([{"type": "video", "video": [url_of(image()), "nothing"]}, text_part("x")])
    the_error(response, 400, "messages[0].content[0].video[1]")


MP4 = clip("mp4", frames=30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated_media"),
        (b"just some text", "unsupported_media"),
        (image(), "unsupported_media"),
        (sound_only(), "unsupported_media"),
        (MP4[:100], "truncated_media"),
        (MP4[: len(MP4) // 2], "truncated_media"),
        (clip("mp4", frames=30, options={"movflags": "faststart"})[:-2000], "truncated_media"),
        (clip("webm", frames=30)[:-2000], "truncated_media"),
        (clip("gif", frames=5)[:-2000], "truncated_media"),
        (clip("mp4", codec="mpeg4"), "unsupported_media"),
        (MP4[:300] + bytes(3000) + MP4[3300:], "unsupported_media"),
    ],
    ids=[
        "empty",
        "text",
        "an image",
        "sound",
        "no header",
        "cut",
        "cut pixels",
        "cut webm",
        "cut gif",
        "codec",
        "holes",
    ],
)
def test_a_video_that_cannot_be_used(service: Served, data: bytes, code: str, stream: bool) -> None:
    before = service.text()
    message = the_error(service.post([text_part("x"), video_part(data)], stream=stream), 400, VIDEO, code)
    assert "/" not in message, "no paths"
    assert service.text() == before


def test_limits(folder: Path) -> None:
    limits = {"max_videos": 1, "max_video_mb": 1, "max_video_seconds": 5.0, "max_video_gigapixels": 0.0005}
    with served(folder, **limits) as service:

        def error(data: bytes, status: int = 413) -> str:
            return the_error(service.post([text_part("x"), video_part(data)]), status, VIDEO, "media_too_large")

        assert service.post([text_part("x"), video_part(clip(frames=40))]).status_code == 200
        assert "6.0 s; at most 5" in error(clip(frames=60))
        assert "gigapixels; at most 0.0005" in error(clip(frames=40, width=160, height=96))
        assert "the file has more than 1048576 bytes" in error(bytes(2**20 + 1))
        assert "at least 1" not in error(clip(frames=60))
        response = service.post([video_part(MP4), video_part(MP4), text_part("x")])
        assert "2 videos, at most 1" in the_error(response, 400, "messages")
        response = service.post([video_part(MP4), image_part(), text_part("x")])
        assert response.status_code == 200, response.text


def test_a_video_that_is_longer_than_the_context(service: Served) -> None:
    """Refused before a frame is decoded: 512 frames of a row each, and their timestamps."""
    data = clip("gif", frames=520, width=16, height=16, rate=1)
    response = service.post([text_part("x"), video_part(data)])
    assert "the context length is" in the_error(response, 400, "messages", "prompt_too_long")
