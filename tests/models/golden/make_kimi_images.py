"""Makes ``kimi_images.json``: what transformers' image processor of Kimi K2.5 makes of seeded pictures. Not a test.
Run it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_kimi_images
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest
from tests.support.image_cases import picture

FILE = Path(__file__).parent / "kimi_images.json"
SETTINGS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4], "max_patches": 100}
SIZES = ((200, 150), (31, 90), (5, 9), (300, 9), (84, 84), (1, 1), (28, 28), (140, 141), (640, 480), (29, 200))


def main() -> None:
    from transformers import Kimi_K25ImageProcessor

    processor = Kimi_K25ImageProcessor(**SETTINGS)
    made = []
    for number, (width, height) in enumerate(SIZES):
        found = processor([picture(width, height, number)], return_tensors="pt")
        grid = found["image_grid_thw"][0].tolist()
        made.append({"width": width, "height": height, "grid": grid, "digest": digest(found["pixel_values"].numpy())})
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


if __name__ == "__main__":
    main()
