"""Sends a running service a question about files and shows the answer as it streams."""

import base64
import json
import mimetypes
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from triptych.cli.waterfall import waterfall
from triptych.config import FrontendConfig
from triptych.errors import ConfigError, StartError
from triptych.observe.timeline import TIMELINE_HEADER

_SUFFIXES = {"video": (".mp4", ".mov", ".webm", ".mkv"), "audio": (".wav", ".flac", ".mp3", ".ogg", ".opus")}
"""Suffixes of files that aren't pictures."""


def request_body(model: str, files: Sequence[str | Path], question: str, **settings: Any) -> dict[str, Any]:
    """Return a streamed chat request. Raises ConfigError for a file that can't be read."""
    message = {"role": "user", "content": [*map(_part, map(Path, files)), {"type": "text", "text": question}]}
    return {"model": model, "messages": [message], "stream": True} | settings


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


async def show_answer(client: httpx.AsyncClient, body: dict[str, Any], console: Console) -> str | None:
    """Write the answer to standard output as it comes, then the timeline to ``console``. Returns the answer, or None
    when the service reports an error, which is shown. Raises StartError for an invalid or missing response."""
    answer: list[str] = []
    last: dict[str, Any] = {}
    try:
        async with aclosing(_chunks(client, body)) as chunks:
            async for last in chunks:
                for choice in last.get("choices", ()):
                    answer.append(choice["delta"].get("content", ""))
                    sys.stdout.write(answer[-1])
                    sys.stdout.flush()
    finally:
        if any(answer):
            print(flush=True)
    if "error" in last:
        console.print(last["error"]["message"], style="red", markup=False)
        return None
    if "timeline" in last:
        console.print(waterfall(last["timeline"]))
    return "".join(answer)


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


def _part(file: Path) -> dict[str, Any]:
    modality = next((kind for kind, ends in _SUFFIXES.items() if file.suffix.lower() in ends), "image")
    return {"type": f"{modality}_url", f"{modality}_url": {"url": _data_url(file)}}


def _data_url(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
