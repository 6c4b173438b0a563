"""Makes ``gemma4_videos.json``: what transformers' video processor of Gemma 4 makes of seeded videos. Not a test. Run
it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_gemma4_videos
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, processed

FILE = Path(__file__).parent / "gemma4_videos.json"
PATCH = 4
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0},
    {"frames": 33, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0, "num_frames": 3},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0, "fps": 4},
    {"frames": 2400, "height": 16, "width": 16, "rate": 5.0},
    {"frames": 5, "height": 75, "width": 56, "rate": 5.0, "num_frames": 2},
    {"frames": 40, "height": 108, "width": 84, "rate": 0.4, "num_frames": 7},
    {"frames": 9, "height": 2, "width": 80, "rate": 2.0, "chosen": True},
    {"frames": 4, "height": 90, "width": 80, "rate": 2.0, "chosen": True}
    | {"settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2, "max_soft_tokens": 140}},
]
"""Without ``num_frames`` and ``fps``, the processor's own 32 frames are used."""


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    return {"patch_size": PATCH} | case.get("settings", {})


def main() -> None:
    made = [case | _made(number, case) for number, case in enumerate(CASES)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    processor: Any = Gemma4VideoProcessor(**settings_of(case))
    if "fps" in case:
        processor.num_frames = None  # which would come first
    batch, metadata = processed(
        processor, number, case, **{name: case[name] for name in ("num_frames", "fps") if name in case}
    )
    text = Gemma4Processor.__new__(Gemma4Processor)
    text.boi_token, text.video_token, text.eoi_token = "<|image>", "<|video|>", "<image|>"
    rows = int(batch["num_soft_tokens_per_video"][0])
    replaced = text.replace_video_token({"num_soft_tokens_per_video": [rows], "video_metadata": [metadata]}, 0)
    positions = batch["video_position_ids"][0, : rows * 9]
    return {
        "indices": [int(index) for index in metadata.frames_indices],
        "grid": [int(positions[:, 1].max()) + 1, int(positions[:, 0].max()) + 1],
        "text": replaced.replace("<|video|>" * rows, "<|video|>"),
        "digest": digest(batch["pixel_values_videos"][:, : rows * 9].numpy()),
    }


if __name__ == "__main__":
    main()
