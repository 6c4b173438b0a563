"""Makes ``videos.json``: what transformers' own processors, whose videos need torchvision, make of seeded videos. Not a
test. Run it from the repository's root in an environment with both:

    python -m venv DIR
    DIR/bin/pip install torch==2.13.0 transformers==5.23.0 pillow numpy
    DIR/bin/pip install --no-deps torchvision==0.28.0
    : > DIR/lib/python3.*/site-packages/torchvision/_meta_registrations.py   # without CUDA its operators don't load
    DIR/bin/python -m tests.models.golden.make_videos
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parent / "videos.json"
TEXT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What happens?<|im_end|>\n"
SPECIAL = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
ASKED = {
    "qwen3_vl": {},
    "qwen2_vl": {"fps": 2},
    "qwen2_5_vl": {"fps": 2},
    "qwen2_5_omni": {"fps": 2},
    "qwen3_omni_moe": {"fps": 1},
}
"""Where a case says nothing. Qwen2-VL's video processor takes all frames unless it is asked."""
SIZES = {
    "qwen3_vl": {"shortest_edge": 4096, "longest_edge": 65536},
    "qwen2_vl": {"shortest_edge": 4 * 28 * 28, "longest_edge": 20 * 28 * 28},
    "qwen2_5_vl": {"shortest_edge": 4 * 28 * 28, "longest_edge": 20 * 28 * 28},
    "qwen2_5_omni": {"shortest_edge": 1, "longest_edge": 2},  # which its processor doesn't look at
    "qwen3_omni_moe": {"shortest_edge": 1, "longest_edge": 2},  # likewise
}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997},
    {"frames": 50, "height": 33, "width": 47, "rate": 24.0, "settings": {"fps": 4}},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0},
    {"frames": 40, "height": 120, "width": 120, "rate": 12.5, "settings": {"max_frames": 5}},
    {"frames": 30, "height": 150, "width": 210, "rate": 10.0, "settings": {"cap_pixels_per_frame": True}},
    {
        "frames": 30,
        "height": 100,
        "width": 80,
        "rate": 15.0,
        "settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2},
    },
    {"frames": 600, "height": 64, "width": 64, "rate": 25.0, "settings": {"min_frames": 8, "fps": 0.1}},
    # Qwen2-VL's video processor: sizes, sampling
    {"family": "qwen2_vl", "frames": 91, "height": 90, "width": 160, "rate": 29.97002997002997},
    {"family": "qwen2_vl", "frames": 3, "height": 20, "width": 300, "rate": 1.0},
    {"family": "qwen2_vl", "frames": 47, "height": 33, "width": 47, "rate": 24.0, "asked": {"fps": 4}},
    {"family": "qwen2_vl", "frames": 40, "height": 300, "width": 200, "rate": 12.5, "asked": {"num_frames": 7}},
    {"family": "qwen2_vl", "frames": 7, "height": 100, "width": 80, "rate": 2.0, "chosen": True},
    {
        "family": "qwen2_vl",
        "frames": 60,
        "height": 120,
        "width": 180,
        "rate": 10.0,
        "settings": {"cap_pixels_per_frame": True, "max_video_tokens": 40},
    },
    {
        "family": "qwen2_vl",
        "frames": 400,
        "height": 56,
        "width": 84,
        "rate": 25.0,
        "settings": {"max_frames": 9, "min_pixels": 20 * 28 * 28, "max_pixels": 30 * 28 * 28},
    },
    {
        "family": "qwen2_vl",
        "frames": 30,
        "height": 100,
        "width": 80,
        "rate": 15.0,
        "settings": {"image_mean": [0.4, 0.5, 0.6], "resample": 2, "min_frames": 6},
    },
    # Qwen2.5-VL's processor: how long a patch in time is
    {"family": "qwen2_5_vl", "frames": 91, "height": 90, "width": 160, "rate": 29.97002997002997},
    {"family": "qwen2_5_vl", "frames": 11, "height": 64, "width": 64, "rate": 30.0},
    {"family": "qwen2_5_vl", "frames": 100, "height": 64, "width": 64, "rate": 25.0, "asked": {"num_frames": 6}},
    {"family": "qwen2_5_vl", "frames": 5, "height": 64, "width": 64, "rate": 0.5, "chosen": True},
    # Qwen3-Omni's: the same, and its own sizes
    {"family": "qwen3_omni_moe", "frames": 200, "height": 90, "width": 160, "rate": 29.97002997002997},
    {"family": "qwen3_omni_moe", "frames": 30, "height": 64, "width": 64, "rate": 30.0, "asked": {"fps": 3}},
    {"family": "qwen3_omni_moe", "frames": 4, "height": 1000, "width": 900, "rate": 2.0, "asked": {"fps": 2}},
    # Qwen2.5-Omni's: likewise
    {"family": "qwen2_5_omni", "frames": 90, "height": 90, "width": 160, "rate": 29.97002997002997},
    {"family": "qwen2_5_omni", "frames": 30, "height": 64, "width": 64, "rate": 30.0, "asked": {"fps": 3}},
    {"family": "qwen2_5_omni", "frames": 4, "height": 1000, "width": 900, "rate": 2.0},
]


def family_of(case: dict[str, Any]) -> str:
    return str(case.get("family", "qwen3_vl"))


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """What the video processor's file says."""
    return {"size": dict(SIZES[family_of(case)]), "cap_pixels_per_frame": False} | case.get("settings", {})


def video(seed: int, frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Noise with blocks, so that resizing leaves something to see: (frames, height, width, 3)."""
    blocks = np.random.default_rng(seed).integers(0, 256, (frames, height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.kron(blocks, np.ones((1, 8, 8, 1), dtype=np.uint8))[:, :height, :width]


def digest(patches: NDArray[np.float32]) -> str:
    """Of the very bits, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(patches, "<f4").tobytes()).hexdigest()


def processed(processor: Any, number: int, case: dict[str, Any], **asked: Any) -> tuple[Any, Any]:
    """What a video processor makes of a case's seeded video, and the video's metadata, which name the frames taken."""
    from transformers.video_utils import VideoMetadata

    frames, rate = case["frames"], case["rate"]
    batch = processor(
        videos=[video(number, frames, case["height"], case["width"])],
        video_metadata=[VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)],
        do_sample_frames=not case.get("chosen", False),
        return_tensors="pt",
        return_metadata=True,
        **asked,
    )
    [metadata] = batch["video_metadata"]
    if metadata.frames_indices is None:
        metadata.frames_indices = list(range(frames))
    return batch, metadata


def main() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", *SPECIAL.values())
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, extra_special_tokens=SPECIAL)
    lines = ",\n".join(json.dumps(case | made(number, case, tokenizer)) for number, case in enumerate(CASES))
    FILE.write_text(f"[\n{lines}\n]\n")


def made(number: int, case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """What the family's processor makes of a case's video."""
    processor = processor_of(case, tokenizer)
    pixels = video(number, case["frames"], case["height"], case["width"])
    metadata = {"total_num_frames": case["frames"], "fps": case["rate"]}
    chosen = case.get("chosen", False)
    asked = {} if chosen else case.get("asked", ASKED[family_of(case)])
    batch = processor(
        text=[TEXT],
        videos=[pixels],
        video_metadata=[metadata],
        do_sample_frames=not chosen,
        return_tensors="pt",
        return_metadata=True,
        **asked,
    )
    indices = batch["video_metadata"][0].frames_indices
    text = tokenizer.decode(batch["input_ids"][0], skip_special_tokens=False)
    seconds = batch.get("second_per_grid_ts", batch.get("video_second_per_grid"))
    return {
        "indices": list(range(case["frames"])) if indices is None else [int(index) for index in indices],
        "grid": batch["video_grid_thw"][0].tolist(),
        "seconds": None if seconds is None else float(seconds[0]),
        "text": re.sub(r"(?:<\|video_pad\|>)+", lambda run: f"<{len(run[0]) // 13} rows>", text),
        "digest": digest(batch["pixel_values_videos"].numpy()),
    }


def processor_of(case: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen3OmniMoeProcessor,
        Qwen3VLProcessor,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    family, settings = family_of(case), settings_of(case)
    if family == "qwen3_vl":
        return Qwen3VLProcessor(Qwen2VLImageProcessor(patch_size=16), tokenizer, Qwen3VLVideoProcessor(**settings))
    if family in ("qwen2_5_omni", "qwen3_omni_moe"):
        ears = WhisperFeatureExtractor(128)
        omni = Qwen2_5OmniProcessor if family == "qwen2_5_omni" else Qwen3OmniMoeProcessor
        return omni(Qwen2VLImageProcessor(), Qwen2VLVideoProcessor(**settings), ears, tokenizer)
    kind = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}[family]
    return kind(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(**settings))


if __name__ == "__main__":
    main()
