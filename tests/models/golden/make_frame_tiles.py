"""Makes ``frame_tiles.json``: what transformers' video processors of families whose frames are tiles make of seeded
videos. Not a test. Run it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_frame_tiles
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, video

FILE = Path(__file__).parent / "frame_tiles.json"
SIDES = {"internvl": 56, "llava_onevision": 75}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0, "num_frames": 8},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997, "num_frames": 7},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0, "num_frames": 3},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0, "fps": 4},
    {"frames": 601, "height": 64, "width": 64, "rate": 25.0, "num_frames": 32},
    {"frames": 5, "height": 75, "width": 56, "rate": 5.0, "num_frames": 2},
    {"frames": 9, "height": 100, "width": 80, "rate": 2.0, "settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2}},
]
"""Without ``num_frames`` and ``fps``, all frames are used."""


def settings_of(family: str, case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    return {"size": {"height": SIDES[family], "width": SIDES[family]}} | case.get("settings", {})


def main() -> None:
    made = [
        {"family": family} | case | _made(family, number, case) for family in SIDES for number, case in enumerate(CASES)
    ]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(family: str, number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

    kinds: dict[str, Any] = {"internvl": InternVLVideoProcessor, "llava_onevision": LlavaOnevisionVideoProcessor}
    processor = kinds[family](**settings_of(family, case))
    asked = {name: case[name] for name in ("num_frames", "fps") if name in case}
    batch = processor(
        videos=[video(number, case["frames"], case["height"], case["width"])],
        video_metadata=[{"total_num_frames": case["frames"], "fps": case["rate"]}],
        do_sample_frames=bool(asked),
        return_tensors="pt",
        return_metadata=True,
        **asked,
    )
    indices = batch["video_metadata"][0].frames_indices
    pixels = batch["pixel_values_videos"][0].numpy()
    side = SIDES[family] // 14
    whole = pixels[..., : 14 * side, : 14 * side].reshape(len(pixels), 3, side, 14, side, 14)
    return {
        "indices": list(range(case["frames"])) if indices is None else [int(index) for index in indices],
        "digest": digest(whole.transpose(0, 2, 4, 1, 3, 5)),
    }


if __name__ == "__main__":
    main()
