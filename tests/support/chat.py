"""Bodies and answers of the chat endpoint, as the API's tests send and read them."""

import base64
import json
import struct
from typing import Any

import httpx

from tests.support.serving import CHAT, Served, text_part
from tests.support.sounds import sound, tone


def the_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Checks an error's shape; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert error["message"]
    return str(error["message"])


def events(service: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
    """The payloads of a stream that must end with ``[DONE]``."""
    with service.client() as client:
        response = client.post(CHAT, json=body | {"stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed_text(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


VIDEO = "messages[0].content[1].video_url.url"


def url_of(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(data)}}


def frames_part(*frames: bytes, **settings: Any) -> dict[str, Any]:
    return {"type": "video", "video": [url_of(frame, "image/png") for frame in frames], **settings}


def prompt_tokens(service: Served, part: dict[str, Any], **fields: Any) -> int:
    response = service.post([part, text_part("x")], max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens"]
    return tokens


WAV = sound("wav", tone(1.5, 16_000))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def input_audio(data: bytes = WAV, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": kind}}


def wav(samples: int, channels: int = 1, rate: int = 16_000, extra: int = 0) -> bytes:
    layout = struct.pack("<HHLLHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    size = samples * channels * 2
    chunks = b"fmt " + struct.pack("<L", 16) + layout + b"data" + struct.pack("<L", size + extra) + bytes(size)
    return b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks
