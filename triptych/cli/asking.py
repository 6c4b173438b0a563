"""Asks a running service a question about picture files and shows the answer as it streams."""

import base64
import json
import mimetypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from triptych.api.app import TIMELINE_HEADER
from triptych.cli.waterfall import waterfall
from triptych.errors import ConfigError


def request_body(model: str, pictures: Sequence[str | Path], question: str, **settings: Any) -> dict[str, Any]:
    """A streamed chat request. Raises ConfigError for a picture that can't be read."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_url(Path(picture))}} for picture in pictures
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    return {"model": model, "messages": [message], "stream": True} | settings


async def show_answer(url: str, body: dict[str, Any], console: Console) -> str | None:
    """Writes the answer to standard output as it comes, then the timeline to ``console``. Returns the answer, or None
    when there was an error, which is shown."""
    timeout = httpx.Timeout(None, connect=10.0)
    answer: list[str] = []
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers={TIMELINE_HEADER: "true"}) as response,
    ):
        if response.status_code != httpx.codes.OK:
            _show_error(console, json.loads(await response.aread()))
            return None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                _show_error(console, chunk)
                return None
            for choice in chunk["choices"]:
                answer.append(choice["delta"].get("content", ""))
                sys.stdout.write(answer[-1])
                sys.stdout.flush()
            if "timeline" in chunk:
                print(flush=True)
                console.print(waterfall(chunk["timeline"]))
    return "".join(answer)


def _show_error(console: Console, body: dict[str, Any]) -> None:
    console.print(body["error"]["message"], style="red", markup=False)


def _data_url(picture: Path) -> str:
    try:
        data = picture.read_bytes()
    except OSError as error:
        raise ConfigError(f"{picture}: {error.strerror}") from None
    kind = mimetypes.guess_type(picture)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
