"""Makes ``kimi_videos.json``: what transformers' processor of Kimi K2.5 makes of seeded videos. Not a test. Run it as
``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_kimi_videos
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, processed

FILE = Path(__file__).parent / "kimi_videos.json"
SETTINGS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4], "max_patches": 60}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0},
    {"frames": 133, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 3, "height": 9, "width": 300, "rate": 2.0},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0, "asked": {"fps": 4}},
    {"frames": 1, "height": 5, "width": 9, "rate": 25.0},
    {"frames": 40, "height": 300, "width": 200, "rate": 12.5, "asked": {"num_frames": 7}},
    {"frames": 9, "height": 84, "width": 84, "rate": 0.4, "chosen": True},
    {"frames": 600, "height": 30, "width": 56, "rate": 5.0, "settings": {"fps": 0.1, "max_patches": 4096}},
    {"frames": 20, "height": 100, "width": 80, "rate": 10.0, "settings": {"temporal_patch_size": 2}},
]


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    chosen: dict[str, Any] = case.get("settings", {})
    return SETTINGS | chosen


def main() -> None:
    made = [case | _made(number, case) for number, case in enumerate(CASES)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    processor: Any = Kimi_K25VideoProcessor(**settings_of(case))
    if "num_frames" in case.get("asked", {}):
        processor.fps = None  # both are refused
    batch, metadata = processed(processor, number, case, **case.get("asked", {}))
    grids = batch["video_grid_thw"].tolist()
    text = Kimi_K25Processor.__new__(Kimi_K25Processor)
    text.video_processor, text.video_token = processor, "#"
    return {
        "indices": [int(index) for index in metadata.frames_indices],
        "grids": grids,
        "text": text.replace_video_token(dict(batch), 0),
        "digest": digest(batch["pixel_values_videos"].numpy()),
    }


if __name__ == "__main__":
    main()
