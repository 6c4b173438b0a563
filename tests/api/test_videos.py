"""Videos over HTTP: answers, and errors that name the invalid field."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import VIDEO, frames_part, prompt_tokens, the_error, url_of, video_part
from tests.support.clips import clip, sound_only
from tests.support.serving import Served, image, image_part, served, text_part
from triptych.config import ItemLimits


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


def test_a_request_sets_the_number_of_frames(service: Served) -> None:
    part = video_part(clip("mp4", frames=80))  # 8 s, of which two frames a second are seen
    all_of_it = prompt_tokens(service, part)
    halved = prompt_tokens(service, part, mm_processor_kwargs={"fps": 1})
    assert halved < all_of_it
    assert prompt_tokens(service, part, mm_processor_kwargs={"num_frames": 8}) == halved
    assert prompt_tokens(service, part, mm_processor_kwargs={"num_frames": 4}) < halved
    smaller = prompt_tokens(service, part, mm_processor_kwargs={"max_pixels": 16 * 32 * 32, "min_pixels": 1})
    assert smaller < all_of_it
    size = {"shortest_edge": 1, "longest_edge": 16 * 32 * 32}
    assert prompt_tokens(service, part, mm_processor_kwargs={"size": size}) == smaller
    assert service.text([part, text_part("x")], mm_processor_kwargs={"fps": 1}, max_tokens=24) != service.text(
        [part, text_part("x")], max_tokens=24
    )


def test_invalid_frame_sampling(service: Served) -> None:
    content = [text_part("x"), video_part(clip("mp4", frames=20))]
    response = service.post(content, mm_processor_kwargs={"fps": 1, "num_frames": 4})
    assert "exclude each other" in the_error(response, 400, "mm_processor_kwargs.fps")
    response = service.post(content, mm_processor_kwargs={"num_frames": 769})
    assert "769 is more than the model takes" in the_error(response, 400, VIDEO, "unsupported_media")
    response = service.post(content, mm_processor_kwargs={"max_pixels": 10**8})
    the_error(response, 400, VIDEO, "bad_media_size")
    for options in ({"fps": 1e-300}, {"fps": 1000}, {"num_frames": 0}, {"num_frames": 1.5}):
        response = service.post(content, mm_processor_kwargs=options)
        the_error(response, 400, f"mm_processor_kwargs.{next(iter(options))}")


def test_a_video_is_sent_once_and_referred_to_later(service: Served) -> None:
    first, other = (clip("mp4", frames=20, seed=seed) for seed in (71, 72))
    known = {"type": "video_url", "video_url": None, "uuid": "clip"}

    def answer(part: dict[str, Any]) -> str:
        return service.text([part, text_part("x")], max_tokens=24)

    expected = answer(video_part(first))
    assert answer(video_part(first) | {"uuid": "clip"}) == answer(known) == expected
    sampled = {"mm_processor_kwargs": {"num_frames": 2}}
    assert prompt_tokens(service, known, **sampled) < prompt_tokens(service, known), "sampled as each request asks"
    assert answer(video_part(other) | {"uuid": "clip"}) == answer(known) != expected
    response = service.post([text_part("x"), known | {"uuid": "another"}])
    the_error(response, 400, "messages[0].content[1].uuid", "unknown_media")
    response = service.post([text_part("x"), {"type": "image_url", "image_url": None, "uuid": "clip"}])
    the_error(response, 400, "messages[0].content[1].uuid", "unknown_media")


def test_a_list_of_frames_is_a_video(service: Served) -> None:
    frames = [image(64, 64, seed) for seed in range(4)]
    slow = service.text([frames_part(*frames, fps=0.5), text_part("x")])
    assert slow == service.text([frames_part(*frames, fps=0.5), text_part("x")])
    response = service.post([frames_part(*frames, image()), text_part("x")])
    assert "same size" in the_error(response, 400, "messages[0].content[0].video", "bad_media_size")
    response = service.post([frames_part(image(), b"hello"), text_part("x")])
    the_error(response, 400, "messages[0].content[0].video", "unsupported_media")
    response = service.post([{"type": "video", "video": []}, text_part("x")])
    the_error(response, 400, "messages[0].content[0].video", "invalid_value")
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
        (clip("webm", frames=30)[:200], "truncated_media"),
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
    limits: dict[str, Any] = {
        "limit_mm_per_prompt": ItemLimits.parse('{"video": 1, "image": 0}'),
        "max_file_mb": 1,
        "max_video_seconds": 5.0,
        "max_video_gigapixels": 0.0005,
    }
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
        assert "1 images, at most 0" in the_error(response, 400, "messages")
        response = service.post([video_part(MP4), text_part("x")])
        assert response.status_code == 200, response.text


def test_a_video_that_is_longer_than_the_context(service: Served) -> None:
    """Refused before a frame is decoded: 512 frames of a row each, and their timestamps."""
    data = clip("gif", frames=520, width=16, height=16, rate=1)
    response = service.post([text_part("x"), video_part(data)])
    assert "maximum context length is" in the_error(response, 400, "messages", "context_length_exceeded")
