"""Audio over HTTP: answers, and errors that name the invalid field."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.audio_cases import CASES, Hears
from tests.support.chat import WAV, encoded, input_audio, the_error, wav
from tests.support.clips import clip
from tests.support.responses import answer, post
from tests.support.serving import CHAT, Served, image, image_part, served, text_part
from tests.support.sounds import sound, tone
from triptych.api.body import extract_inline_media
from triptych.config import ItemLimits
from triptych.prompt.prompt import PromptBuilder

DATA, URL = "messages[0].content[1].input_audio.data", "messages[0].content[1].audio_url.url"


def audio_url(data: bytes = WAV, kind: str = "audio/wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:{kind};base64,{encoded(data)}"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("container", ["wav", "flac", "mp3", "ogg"])
def test_audio_is_answered(hearing: Served, container: str, stream: bool) -> None:
    data = sound(container, tone(1.2, 48_000, 2), 48_000)
    response = hearing.post([text_part("x"), audio_url(data)], stream=stream)
    assert response.status_code == 200, response.text


def test_an_answer_does_not_depend_on_how_the_audio_came(hearing: Served, hears: Path) -> None:
    (hears / "sound.wav").write_bytes(WAV)
    content = [text_part("x"), input_audio()]
    answer = hearing.text(content)
    assert hearing.text([text_part("x"), audio_url()]) == answer
    local = {"type": "audio_url", "audio_url": {"url": f"file://{hears}/sound.wav"}}
    assert hearing.text([text_part("x"), local]) == answer
    body = json.dumps(hearing.body(content))
    assert extract_inline_media(bytearray(body.encode())).inline
    escaped = body.replace("A", "\\u0041")
    assert extract_inline_media(bytearray(escaped.encode())).inline
    with hearing.client() as client:
        answered = client.post(CHAT, content=escaped.encode()).json()
    assert answered["choices"][0]["message"]["content"] == answer
    assert hearing.text([text_part("x"), input_audio(sound("wav", tone(1.5, 16_000, hertz=900)))]) != answer


def test_responses_take_audio_as_chats_do(hearing: Served) -> None:
    """Extracted from the body or small enough to stay in it; errors name this API's fields."""
    for data in (WAV, sound("wav", tone(0.05, 16_000))):
        expected = hearing.text([text_part("x"), input_audio(data)], max_tokens=8, temperature=0)
        content = [{"type": "input_text", "text": "x"}, input_audio(data)]
        items = [{"role": "user", "content": content}]
        whole = answer(hearing, input=items, max_output_tokens=8, temperature=0, ignore_eos=True)
        assert whole["output"][0]["content"][0]["text"] == expected
    items = [{"role": "user", "content": [input_audio(b"just some text")]}]
    the_error(post(hearing, input=items), 400, "input[0].content[0].input_audio.data", "unsupported_media")
    unknown = {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "pcm16"}}
    response = post(hearing, input=[{"role": "user", "content": [unknown]}])
    the_error(response, 400, "input[0].content[0].input_audio.format", "unsupported_value")


@pytest.mark.parametrize("name", ["wav", "aiff", "M4A", "webm", "x-wav", "dts"])
def test_the_named_format_may_be_any_that_is_served(hearing: Served, name: str) -> None:
    """The data decides what it is."""
    part = {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": name}}
    assert hearing.text([part], max_tokens=2) == hearing.text([input_audio(WAV)], max_tokens=2)


def test_another_format_is_refused_with_those_that_are_served(hearing: Served) -> None:
    part = {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "pcm16"}}
    message = the_error(hearing.post([text_part("x"), part]), 400, DATA[:-4] + "format", "unsupported_value")
    assert all(name in message for name in ("aiff", "m4a", "webm", "amr"))


def test_answers_are_those_of_transformers(hearing: Served, hears: Path) -> None:
    """Token by token: audio alone, and with pictures and text around it."""
    model = Hears(hears, CASES)
    kinds = {"audio": input_audio, "image": image_part}
    for (name, messages), expected in zip(CASES.items(), model.answers, strict=True):
        if "video" in name:  # whose size is asked for part by part
            continue
        content = messages[0]["content"]
        parts = [part if part["type"] == "text" else kinds[part["type"]](part["data"]) for part in content]
        response = hearing.post(parts, max_tokens=32, temperature=0, logprobs=True)
        token_bytes = [entry["bytes"] for entry in response.json()["choices"][0]["logprobs"]["content"]]
        spelled = PromptBuilder(hears).tokenizer.bytes_of
        assert token_bytes == [list(spelled(token)) for token in expected]


def test_the_prompt_has_the_rows_that_were_planned(hearing: Served) -> None:
    """13 tokens for each second."""
    tokens = [
        hearing.post([audio_url(sound("flac", tone(seconds, 16_000))), text_part("x")]).json()["usage"]["prompt_tokens"]
        for seconds in (1.0, 2.0, 7.0)
    ]
    assert [count - tokens[0] for count in tokens] == [0, 13, 78]


def test_the_list_of_models_has_the_input_modalities(hearing: Served) -> None:
    with hearing.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "audio", "image", "video"]


def test_a_clip_is_cached_by_its_uuid(hearing: Served) -> None:
    answer = hearing.text([text_part("x"), input_audio() | {"uuid": "mine"}])
    for again in (
        {"type": "input_audio", "input_audio": None, "uuid": "mine"},
        {"type": "audio_url", "audio_url": None, "uuid": "mine"},
    ):
        assert hearing.text([text_part("x"), again]) == answer
    response = hearing.post([text_part("x"), {"type": "audio_url", "audio_url": None, "uuid": "other"}])
    the_error(response, 400, "messages[0].content[1].uuid", "unknown_media")
    response = hearing.post([text_part("x"), {"type": "input_audio", "input_audio": None}])
    the_error(response, 400, "messages[0].content[1].input_audio", "invalid_value")


FLAC = sound("flac", tone(3.0, 16_000))
LYING = bytearray(FLAC)
LYING[21:26] = (int.from_bytes(LYING[21:26]) & ~((1 << 36) - 1) | 16_000).to_bytes(5)  # samples: as of one second

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated_media"),
    "text": (b"just some text", "unsupported_media"),
    "an image": (image(), "unsupported_media"),
    "a video without sound": (clip("mp4", frames=5), "unsupported_media"),
    "no samples": (wav(0), "bad_media_size"),
    "too short": (wav(399), "bad_media_size"),
    "cut header": (WAV[:30], "truncated_media"),
    "cut wav": (wav(16_000, extra=1000), "truncated_media"),
    "cut flac": (FLAC[: len(FLAC) // 2], "unsupported_media"),
    "cut ogg": (sound("ogg", tone(3.0, 48_000), 48_000)[:-500], "truncated_media"),
    "longer than it says": (bytes(LYING), "media_mismatch"),
    "slow": (wav(1000, rate=1000), "unsupported_media"),
    "fast": (wav(1000, rate=4_000_000), "unsupported_media"),
    "many channels": (wav(1000, channels=65), "unsupported_media"),
    "no channels": (wav(1000, channels=1)[:22] + bytes(2) + wav(1000)[24:], "unsupported_media"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_audio_that_cannot_be_used(hearing: Served, name: str, stream: bool) -> None:
    data, code = BAD[name]
    for part, param in ((input_audio(data), DATA), (audio_url(data), URL)):
        message = the_error(hearing.post([text_part("x"), part], stream=stream), 400, param, code)
        assert "/" not in message, "no paths"
    assert hearing.post([text_part("x"), input_audio(wav(16_000))]).status_code == 200, "silence is audio"


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "input_audio", "input_audio": {"data": "?" * 10, "format": "wav"}}, DATA, "invalid_value"),
        ({"type": "input_audio", "input_audio": {"data": "?" * 10_000, "format": "wav"}}, DATA, "invalid_value"),
        (
            {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "pcm16"}},
            DATA[:-4] + "format",
            "unsupported_value",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": encoded(WAV)}},
            DATA[:-4] + "format",
            "missing_required_parameter",
        ),
        ({"type": "audio_url", "audio_url": {"url": encoded(WAV)}}, URL, "media_not_allowed"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,?"}}, URL, "invalid_value"),
    ],
)
def test_invalid_parts(hearing: Served, part: dict[str, Any], param: str, code: str) -> None:
    the_error(hearing.post([text_part("x"), part]), 400, param, code)


def test_a_model_without_audio(service: Served) -> None:
    message = the_error(service.post([text_part("x"), input_audio()]), 400, DATA, "unsupported_media")
    assert "takes no audio clips" in message


def test_limits(hears: Path) -> None:
    limits: dict[str, Any] = {
        "limit_mm_per_prompt": ItemLimits.parse("audio=1"),
        "max_file_mb": 1,
        "max_item_tokens": 30,
    }
    limits |= {"max_audio_seconds": 3.0, "max_audio_gigasamples": 0.0002}
    with served(hears, **limits) as service:

        def error(data: bytes) -> str:
            return the_error(service.post([text_part("x"), input_audio(data)]), 413, DATA, "media_too_large")

        assert service.post([text_part("x"), input_audio(wav(32_000))]).status_code == 200
        assert "3.5 s; at most 3" in error(wav(56_000))
        assert "8 channels of 32000 samples" in error(wav(32_000, channels=8))
        assert "31 tokens; at most 30" in error(wav(38_500))
        assert "the file has more than 1048576 bytes" in error(bytes(2**20 + 1))
        response = service.post([input_audio(), audio_url(), text_part("x")])
        assert "2 audio clips, at most 1" in the_error(response, 400, "messages")
        response = service.post([input_audio(), image_part(), text_part("x")])
        assert response.status_code == 200, response.text


def test_a_clip_that_is_longer_than_the_context(hearing: Served) -> None:
    """Refused before a sample is decoded."""
    response = hearing.post([text_part("x"), input_audio(wav(4_000 * 340, rate=4_000))])
    assert "maximum context length is" in the_error(response, 400, "messages", "context_length_exceeded")
