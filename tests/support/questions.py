"""Questions whose right answers are known, and clients that ask them over and over."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.serving import CHAT, image, image_part, served, text_part

AT_ONCE = 16
PICTURES = 24
SETTINGS = {"model": "tiny", "max_tokens": 12, "ignore_eos": True, "logprobs": True}
Answer = list[list[int]] | str
"""The bytes of each token, or the error."""


@dataclass(frozen=True)
class Questions:
    """About pictures, and some texts. ``right`` are the answers of one process, in which nothing goes wrong."""

    folder: Path
    contents: list[Any]
    right: list[Answer]

    @classmethod
    def about(cls, folder: Path) -> "Questions":
        pictures = [[image_part(image(96 + 32 * (n % 3), 96, n)), text_part("What is it?")] for n in range(PICTURES)]
        contents = [*pictures, "Hello", "Tell me a story"]
        with served(folder, "1EPD") as service:
            return cls(folder, contents, [_ask(service.url, content) for content in contents])

    def wrong_answers(self, url: str, number: int) -> list[Answer]:
        """Ask that many times, several at a time. Return the answers that aren't right."""

        def ask(n: int) -> tuple[Answer, Answer]:
            content = n % len(self.contents)
            return _ask(url, self.contents[content]), self.right[content]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [answer for answer, right in pool.map(ask, range(number)) if answer != right]


def _ask(url: str, content: Any) -> Answer:
    """Each request has a cache salt of its own, so that no work is shared."""
    body = {"messages": [{"role": "user", "content": content}], "cache_salt": secrets.token_hex(4)} | SETTINGS
    with httpx.Client(base_url=url, trust_env=False, timeout=90) as client:
        response = client.post(CHAT, json=body)
    if response.status_code != 200:
        return f"{response.status_code}: {response.text}"
    return [token["bytes"] for token in response.json()["choices"][0]["logprobs"]["content"]]
