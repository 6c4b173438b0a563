"""Makes ``glm_videos.json``: what transformers' video processors of GLM-4.1V and GLM-4.6V make of seeded videos. Not a
test. Run it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_glm_videos
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, processed

FILE = Path(__file__).parent / "glm_videos.json"
SIZE = {"shortest_edge": 2 * 56 * 56, "longest_edge": 16 * 84 * 84}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0},
    {"frames": 1, "height": 64, "width": 64, "rate": 5.0},
    {"frames": 62, "height": 64, "width": 64, "rate": 2.0},
    {"frames": 700, "height": 40, "width": 40, "rate": 2.0},
    {"frames": 40, "height": 56, "width": 56, "rate": 0.1},
    {"frames": 7, "height": 90, "width": 40, "rate": 2.0, "chosen": True},
]


def main() -> None:
    made = [
        {"family": family} | case | _made(family, number, case)
        for family in ("Glm4v", "Glm46V")
        for number, case in enumerate(CASES)
    ]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(family: str, number: int, case: dict[str, Any]) -> dict[str, Any]:
    import transformers

    processor = getattr(transformers, f"{family}VideoProcessor")(size=SIZE)
    batch, metadata = processed(processor, number, case)
    texts = getattr(transformers, f"{family}Processor")
    text = texts.__new__(texts)
    text.video_processor, text.image_token = processor, "<|image|>"
    grid = batch["video_grid_thw"][0].tolist()
    given = {"video_grid_thw": batch["video_grid_thw"], "video_metadata": [metadata]}
    rows = grid[1] * grid[2] // 4
    return {
        "indices": [int(index) for index in metadata.frames_indices],
        "grid": grid,
        "text": text.replace_video_token(given, 0).replace("<|image|>" * rows, "<|image|>"),
        "digest": digest(batch["pixel_values_videos"].numpy()),
    }


if __name__ == "__main__":
    main()
