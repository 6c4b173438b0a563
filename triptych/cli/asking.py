"""Sends a running service a question about files and shows the answer as it streams."""

import base64
import json
import mimetypes
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from triptych.cli.waterfall import waterfall
from triptych.config import FrontendConfig
from triptych.errors import ConfigError, RequestError, StartError
from triptych.observe.timeline import TIMELINE_HEADER
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.probe_video import probe_video

_SUFFIXES = {"video": (".mp4", ".mov", ".webm", ".mkv"), "audio": (".wav", ".flac", ".mp3", ".ogg", ".opus")}
"""Suffixes of files that aren't pictures."""

_PROBES: dict[str, Callable[[bytes], object]] = {
    "image": probe_image,
    "video": probe_video,
    "audio": probe_audio,
}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def request_body(model: str, files: Sequence[str | Path], question: str, **settings: Any) -> dict[str, Any]:
    """Return a streamed chat request. Raises ConfigError for a file that can't be read."""
    message = {"role": "user", "content": [*map(file_part, map(Path, files)), {"type": "text", "text": question}]}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [message]} | counted | settings


def client_of(url: str, frontend: FrontendConfig) -> httpx.AsyncClient:
    """Return a client of a service that this command has started, with one of its keys if it has any."""
    keys = frontend.auth.api_keys()
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {keys[0]}"} if keys else {},
        trust_env=False,
        verify=False,  # noqa: S501 - the certificate may be for another name than this machine's loopback
        timeout=httpx.Timeout(None, connect=10.0),
    )


async def model_of(client: httpx.AsyncClient) -> str:
    """Return the name of the service's model. Raises StartError if it doesn't say one."""
    url = str(client.base_url).rstrip("/")
    try:
        response = await client.get("/v1/models")
        match response.json():
            case {"data": [{"id": str(name)}, *_]}:
                return name
            case {"error": {"message": str(message)}}:
                raise StartError(f"{url}: {message}")
    except (httpx.HTTPError, ValueError) as error:
        raise StartError(f"no answer from {url}: {error or type(error).__name__}; is it served?") from None
    raise StartError(f"{url} names no model at /v1/models: is it a service's address?")


async def show_answer(
    client: httpx.AsyncClient, body: dict[str, Any], console: Console, *, timings: bool = True
) -> str | None:
    """Write the answer to standard output as it comes, reasoning dimly and to a terminal alone. With ``timings``, show
    where the time went on ``console``. Returns the answer, or None when the service reports an error, which is shown.
    Raises StartError for an invalid or missing response."""
    answer, shown, pace = [], Writer(), Pace()
    last: dict[str, Any] = {}
    timeline: list[dict[str, Any]] = []
    try:
        async with aclosing(_chunks(client, body)) as chunks:
            async for last in chunks:
                for choice in last.get("choices", ()):
                    delta = choice["delta"]
                    answer.append(delta.get("content") or "")
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    pace.count(answer[-1] or reasoning)
                    shown.write(reasoning, dim=True)
                    shown.write(answer[-1])
                timeline = last.get("timeline", timeline)
                pace.usage = last.get("usage") or pace.usage
    finally:
        shown.end()
    if "error" in last:
        console.print(last["error"]["message"], style="red", markup=False)
        return None
    if timings and timeline:
        console.print(waterfall(timeline))
    if timings and pace.usage:
        console.print(str(pace), style="dim", highlight=False)
    return "".join(answer)


class Pace:
    """How quickly an answer comes."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] = {}
        """Tokens, as the service counts them."""
        self._asked = time.monotonic()
        self._first = self._last = 0.0

    def count(self, text: str) -> None:
        """Note the time of a piece of text."""
        if text:
            self._last = time.monotonic()
            self._first = self._first or self._last

    def __str__(self) -> str:
        prompt, tokens = (self.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens"))
        shown = f"{prompt} tokens in, {tokens} out; first after {max(0.0, self._first - self._asked):.2f} s"
        seconds = self._last - self._first
        return f"{shown}, then {(tokens - 1) / seconds:.1f} per second" if tokens > 1 and seconds > 0 else shown


class Writer:
    """Writes an answer to standard output. On a terminal, control characters are replaced: a model could type with
    them."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._at_end = ""

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a piece; what is ``dim`` only to a terminal, and apart from the rest."""
        if not text or (dim and not self._is_terminal):
            return
        if dim != self._is_dim:
            self._switch(dim)
        shown = _CONTROL.sub("\ufffd", text.replace("\r\n", "\n")) if self._is_terminal else text
        sys.stdout.write(shown)
        sys.stdout.flush()
        self._at_end = shown[-1:]

    def end(self) -> None:
        """End the line."""
        if self._is_dim:
            self._switch(False)
        elif self._at_end:
            print(flush=True)

    def _switch(self, dim: bool) -> None:
        codes = ("\x1b[0m\n\n", "\x1b[2m") if os.environ.get("TERM", "dumb") != "dumb" else ("\n\n", "")
        sys.stdout.write(codes[dim])
        self._is_dim = dim


async def _chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of the response; an error is the last. Raises StartError when it is missing or incomplete."""
    url, headers = str(client.base_url).rstrip("/"), {TIMELINE_HEADER: "true"}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                yield _parsed(url, (await response.aread()).decode(errors="replace"))
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield (chunk := _parsed(url, line.removeprefix("data: ")))
                    if "error" in chunk:
                        return
    except httpx.HTTPError as error:
        raise StartError(f"no answer from {url}: {error or type(error).__name__}") from None
    raise StartError(f"no complete answer from {url}: the stream ended early")


def _parsed(url: str, text: str) -> dict[str, Any]:
    try:
        match json.loads(text):
            case {"choices": list()} | {"error": {"message": str()}} as body:
                return dict(body)
    except ValueError:
        pass
    raise StartError(f"no answer from {url}: it sent {text[:200]!r}")


def check_media(file: Path, modality: str = "") -> None:
    """Raise ConfigError for a file that no service would take, before one is started for it."""
    try:
        _PROBES[modality or _modality(file)](_read(file))
    except RequestError as error:
        raise ConfigError(f"{file}: {error}") from None


def file_part(file: Path, modality: str = "") -> dict[str, Any]:
    """Return the part of a message that a file is, of the modality that its name says unless one is given. Raises
    ConfigError for a file that can't be read."""
    modality = modality or _modality(file)
    return {"type": f"{modality}_url", f"{modality}_url": {"url": _data_url(file)}}


def _modality(file: Path) -> str:
    return next((kind for kind, ends in _SUFFIXES.items() if file.suffix.lower() in ends), "image")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _data_url(file: Path) -> str:
    data = _read(file)
    kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
