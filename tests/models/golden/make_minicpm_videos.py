"""Makes ``minicpm_videos.json``: what transformers' processor of MiniCPM-V 4.6 makes of seeded videos. Not a test. Run
it as ``make_videos``, in the same environment:

    DIR/bin/python -m tests.models.golden.make_minicpm_videos
"""

import json
from pathlib import Path
from typing import Any

from tests.models.golden.make_videos import digest, video

FILE = Path(__file__).parent / "minicpm_videos.json"
SETTINGS: dict[str, Any] = {"scale_resolution": 48, "max_slice_nums": 5, "patch_size": 4}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0},
    {"frames": 47, "height": 33, "width": 47, "rate": 24.0, "settings": {"max_num_frames": 1}},
    {"frames": 130, "height": 40, "width": 30, "rate": 10.0, "settings": {"max_num_frames": 6}},
    {"frames": 9, "height": 100, "width": 80, "rate": 2.0, "settings": {"downsample_mode": "4x"}},
    {"frames": 5, "height": 80, "width": 80, "rate": 3.0, "settings": {"slice_mode": False}},
    {"frames": 4, "height": 70, "width": 90, "rate": 2.0, "settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2}},
]


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    return SETTINGS | case.get("settings", {})


def main() -> None:
    made = [case | _made(number, case) for number, case in enumerate(CASES)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def _made(number: int, case: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    frames, rate = case["frames"], case["rate"]
    processor = MiniCPMV4_6VideoProcessor(**settings_of(case))
    metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
    batch = processor(
        videos=[video(number, frames, case["height"], case["width"])],
        video_metadata=[metadata],
        return_tensors="pt",
        return_metadata=True,
    )
    texts = MiniCPMV4_6Processor.__new__(MiniCPMV4_6Processor)
    texts.video_slice_mode, texts.video_token = processor.slice_mode, "#"
    texts.image_start_token, texts.image_end_token = "<image>", "</image>"
    texts.slice_start_token, texts.slice_end_token = "<slice>", "</slice>"
    divisor = 4 if processor.downsample_mode == "4x" else 16
    sizes = batch["target_sizes_videos"].tolist()
    # [channels, patch, patch of all pieces] → as our patches are: [patches, channels, patch, patch]
    packed = batch["pixel_values_videos"].numpy()[0].reshape(3, 4, -1, 4).transpose(2, 0, 1, 3)
    return {
        "indices": [int(index) for index in batch["video_metadata"][0].frames_indices],
        "sizes": sizes,
        "text": texts.replace_video_token(dict(batch), 0, video_token_divisor=divisor),
        "digest": digest(packed),
    }


if __name__ == "__main__":
    main()
