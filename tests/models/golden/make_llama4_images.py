"""Makes ``llama4_images.json``: what transformers' image processor of Llama 4, which needs torchvision, makes of seeded
images. Not a test. Run it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_llama4_images
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.models.golden.make_videos import digest

FILE = Path(__file__).parent / "llama4_images.json"
SIZE = {"height": 56, "width": 56}
CASES: list[dict[str, Any]] = [
    {"height": 56, "width": 56},
    {"height": 56, "width": 112},
    {"height": 90, "width": 160},
    {"height": 301, "width": 107},
    {"height": 9, "width": 5},
    {"height": 1, "width": 1},
    {"height": 20, "width": 700},
    {"height": 900, "width": 31},
    {"height": 600, "width": 611},
    {"height": 113, "width": 169},
    {"height": 56, "width": 57},
    {"height": 40, "width": 70, "settings": {"resize_to_max_canvas": True}},
    {"height": 333, "width": 222, "settings": {"resize_to_max_canvas": True, "max_patches": 6}},
    {"height": 200, "width": 300, "settings": {"max_patches": 4}},
    {"height": 200, "width": 300, "settings": {"max_patches": 1}},
    {
        "height": 120,
        "width": 70,
        "settings": {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.6, 0.3, 0.4], "resample": 3},
    },
]


def image(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """Noise: uint8 [height, width, channels]."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def main() -> None:
    made = [case | _made(number, case) for number, case in enumerate(CASES)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    processor: Any = Llama4ImageProcessor(size=SIZE, **case.get("settings", {}))
    batch = processor([Image.fromarray(image(number, case["height"], case["width"]))], return_tensors="pt")
    pixels = batch["pixel_values"].float().numpy()
    side = SIZE["height"] // 14
    patches = pixels.reshape(len(pixels), 3, side, 14, side, 14).transpose(0, 2, 4, 1, 3, 5)
    rows, columns = batch["aspect_ratios"][0].tolist()
    return {"tiles": [rows, columns], "digest": digest(np.ascontiguousarray(patches))}


if __name__ == "__main__":
    main()
