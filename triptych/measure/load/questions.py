"""Builds chat requests that are unique by their number, so that no cache helps where none is meant to."""

import json
import random
from collections.abc import Sequence

from triptych.measure.load.client import STREAMED
from triptych.measure.load.pictures import data_url

_WORDS = ("stone", "river", "lamp", "seven", "under", "cloud", "quick", "paper", "green", "north", "wheel", "salt")


def words(seed: int, length: int) -> str:
    """Return a text of ``length`` characters that begins with its seed."""
    rng = random.Random(seed)
    return f"{seed} {' '.join(rng.choices(_WORDS, k=length))}"[:length]


def content(pictures: Sequence[bytes], text: str) -> list[dict[str, object]]:
    """Return a message's content: PNG files, then a text."""
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures
    ]
    return [*parts, {"type": "text", "text": text}]


def chat_body(model: str, message: object, max_tokens: int, salt: str = "") -> bytes:
    """Return the JSON of a request with one message, of that content. Its answer streams and has exactly
    ``max_tokens`` tokens. Nothing is cached across different salts."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **STREAMED,
    }
    return json.dumps(body | ({"cache_salt": salt} if salt else {})).encode()
