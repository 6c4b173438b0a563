"""``use_audio_in_video`` over HTTP: answers, and errors that name the invalid field."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chat import VIDEO, frames_part, input_audio, prompt_tokens, the_error, video_part
from tests.support.clips import clip
from tests.support.serving import Served, image, served, text_part
from tests.support.sounds import tone
from triptych.config import ItemLimits

USE = "mm_processor_kwargs.use_audio_in_video"
SECONDS = 3.0


def film(seconds: float = SECONDS, **options: Any) -> bytes:
    settings: dict[str, Any] = {"container": "mp4", "frames": 30, "sound": tone(seconds, 48_000)}
    return clip(**(settings | options))


def options(**more: Any) -> dict[str, Any]:
    return {"mm_processor_kwargs": {"use_audio_in_video": True, "min_pixels": 1, "max_pixels": 12 * 28 * 28} | more}


def ask(service: Served, data: bytes, **fields: Any) -> httpx.Response:
    return service.post([text_part("x"), video_part(data)], **options() | fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_a_video_with_its_audio_is_answered(hearing: Served, container: str, stream: bool) -> None:
    response = ask(hearing, film(container=container), stream=stream)
    assert response.status_code == 200, response.text


def test_the_prompt_has_the_rows_of_both(hearing: Served) -> None:
    """13 tokens for each second, and the audio's delimiters."""
    part = video_part(film(sound_codec="flac"))
    seen = prompt_tokens(hearing, part, **options(use_audio_in_video=False))
    assert prompt_tokens(hearing, part, **options()) - seen == 13 * SECONDS + 2
    assert prompt_tokens(hearing, part, **options(use_audio_in_video=None)) == seen


def test_the_answer_depends_on_the_audio(hearing: Served) -> None:
    asked = {
        hearing.text([text_part("x"), video_part(data)], max_tokens=24, **options())
        for data in (film(), film(sound=tone(SECONDS, 48_000, hertz=900)))
    }
    assert len(asked) == 2


def test_without_videos_it_changes_nothing(hearing: Served) -> None:
    content = [text_part("x"), input_audio()]
    assert hearing.text(content, **options()) == hearing.text(content)


LYING = bytearray(film(frames=5, options={"movflags": "faststart"}))
_clock = LYING.index(b"mdhd", LYING.index(b"mdhd") + 1)  # of the second track
LYING[_clock + 16 : _clock + 20] = (5_000).to_bytes(4, "big")  # ticks a second, instead of 48,000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (clip("mp4", frames=30), "unsupported_media", "the MP4 video has no audio track"),
        (clip("webm", frames=30), "unsupported_media", "the WebM video has no audio track"),
        (clip("gif", frames=9), "unsupported_media", "GIFs and lists of frames"),
        (film().replace(b"mp4a", b"mlpa"), "unsupported_media", "'mlpa', which isn't supported"),
        (film(0.01, sound_codec="flac"), "bad_media_size", "shorter than 25 ms"),
        (film()[:100], "truncated_media", ""),
        (film(options={"movflags": "faststart"})[:-3000], "truncated_media", ""),
        (bytes(LYING), "truncated_media", "sound ends after 0.3 s of 3.1 s"),
    ],
    ids=["silent mp4", "silent webm", "gif", "codec", "short", "no header", "cut", "lying"],
)
def test_invalid_audio_tracks(hearing: Served, data: bytes, code: str, message: str, stream: bool) -> None:
    assert message in the_error(ask(hearing, data, stream=stream), 400, VIDEO, code)
    assert ask(hearing, film()).status_code == 200


def test_a_list_of_frames_has_no_audio(hearing: Served) -> None:
    response = hearing.post([frames_part(image(), image()), text_part("x")], **options())
    assert "lists of frames" in the_error(response, 400, "messages[0].content[0].video", "unsupported_media")


def test_audio_may_be_shorter_than_the_video(hearing: Served) -> None:
    for seconds in (0.4, 7.0):
        assert ask(hearing, film(seconds)).status_code == 200


def test_a_model_without_audio(service: Served) -> None:
    assert "doesn't use the audio of videos" in the_error(ask(service, film()), 400, USE, "invalid_value")
    response = service.post("Hello", **options())
    the_error(response, 400, USE, "invalid_value")
    assert service.post("Hello", **options(use_audio_in_video=False)).status_code == 200
    the_error(service.post("Hello", mm_processor_kwargs={"use_audio_in_video": "loud"}), 400, USE)


def test_limits(hears: Path) -> None:
    with served(hears, limit_mm_per_prompt=ItemLimits.parse("audio=1,video=2"), max_audio_seconds=4.0) as service:
        assert ask(service, film()).status_code == 200
        response = service.post([video_part(film()), input_audio(), text_part("x")], **options())
        assert "2 audio clips, at most 1" in the_error(response, 400, "messages")
        response = ask(service, film(5.0))
        assert "takes 5.0 s; at most 4" in the_error(response, 413, VIDEO, "media_too_large")
