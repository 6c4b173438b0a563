"""Makes ``smolvlm_videos.json``: what transformers' processors of SmolVLM make of seeded videos. Not a test. Run it as
``make_videos``, in the same environment with num2words:

    DIR/bin/python -m tests.models.golden.make_smolvlm_videos
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, processed

FILE = Path(__file__).parent / "smolvlm_videos.json"
SIDE, PATCH = 88, 14
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0, "asked": {"fps": 3}},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0, "asked": {"num_frames": 2}},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0, "asked": {"fps": 4}},
    {"frames": 601, "height": 30, "width": 30, "rate": 25.0},
    {"frames": 300, "height": 48, "width": 40, "rate": 2.0, "asked": {"num_frames": 20}},
    {"frames": 5, "height": 88, "width": 88, "rate": 5.0, "settings": {"resample": 3}},
    {"frames": 9, "height": 100, "width": 80, "rate": 2.0, "settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2}},
    {"frames": 3700, "height": 8, "width": 8, "rate": 1.0},
    {"frames": 7, "height": 4, "width": 150, "rate": 0.01},
]


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    own = {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": SIDE}}
    return own | {"video_sampling": {"fps": 1, "max_frames": 64}} | case.get("settings", {})


def main() -> None:
    made = [case | _made(number, case) for number, case in enumerate(CASES)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers import SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    processor = SmolVLMVideoProcessor(**settings_of(case))
    batch, metadata = processed(processor, number, case, **case.get("asked", {}))
    texts = SmolVLMProcessor.__new__(SmolVLMProcessor)
    texts.image_seq_len, texts.image_token = 1, "[image]"
    texts.fake_image_token, texts.global_image_token = "<fake_token_around_image>", "<global-img>"
    pixels = batch["pixel_values"][0].numpy()
    side = SIDE // PATCH
    whole = pixels[..., : PATCH * side, : PATCH * side].reshape(len(pixels), 3, side, PATCH, side, PATCH)
    return {
        "indices": [int(index) for index in metadata.frames_indices],
        "text": texts.replace_video_token(batch.data, 0),
        "digest": digest(whole.transpose(0, 2, 4, 1, 3, 5)),
    }


if __name__ == "__main__":
    main()
