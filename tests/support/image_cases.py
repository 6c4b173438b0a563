"""The prompts that every topology must answer as transformers does."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Noise with large blocks, so that resizing leaves something to see."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(blocks, np.ones((16, 16, 1), dtype=np.uint8))[:height, :width])


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, format="PNG")
    return data.getvalue()


@dataclass(frozen=True)
class Case:
    """``parts`` are texts and pictures in the order of one user message."""

    name: str
    parts: tuple[str | Image.Image, ...]

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.parts if isinstance(part, Image.Image)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "data": png(part)}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]


CASES = [
    Case("text", ("Name three colours of the rainbow, and say why.",)),
    Case("one image", (picture(200, 150, 1), "What is in the picture?")),
    Case(
        "several images between text",
        ("First ", picture(96, 160, 2), " then ", picture(128, 128, 3), picture(64, 96, 4), " what differs?"),
    ),
    Case("tiny image", (picture(5, 9, 5), "And this?")),
    Case("large image", ("Describe ", picture(900, 700, 6))),
    Case("image last", ("Look: ", picture(160, 96, 7))),
    Case("longer text", ("word " * 60,)),
    Case("two alike", (picture(96, 96, 8), picture(96, 96, 8), "Are they the same?")),
]
"""Eight, so that they make one mixed batch."""
TEXTS = [
    *[case for case in CASES if not case.images],
    Case("one word", ("Why?",)),
    Case("digits", ("31415926535897932384626433832795",)),
    Case("several parts", ("First this.", "Then that, in a part of its own.")),
    Case("long", ("The quick brown fox jumps over the lazy dog. " * 5,)),
]

THIN: dict[str, tuple[tuple[int, int], ...]] = {
    # its published code refuses images that become less than ten pixels high or wide
    **dict.fromkeys(("phi4_multimodal", "phi4mm"), ((400, 10), (10, 400))),
    # the reference fails for an image of which a side rounds to nothing
    **dict.fromkeys(("llava+pixtral", "mistral3"), ((560, 4), (4, 560))),
    # whose tower takes as long for one as all others together
    "deepseek_ocr2": ((3, 600),),
}
"""Sizes of thin images of families that have others than the rest."""
HUGE = (6000, 5000)


def thin_sizes(family: str) -> tuple[tuple[int, int], ...]:
    """Sizes of images whose sides differ as much as the family, and its reference, take."""
    return THIN.get(family, ((600, 3), (3, 600)))
