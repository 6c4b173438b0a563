"""Makes ``qwen3_vl_videos.json`` and ``qwen3_vl_videos.safetensors``: what transformers' own video processor, which
needs torchvision, makes of seeded videos. Not a test. Run it from the repository's root in an environment with both:

    python -m venv DIR
    DIR/bin/pip install torch==2.13.0 transformers==5.23.0 pillow numpy
    DIR/bin/pip install --no-deps torchvision==0.28.0
    : > DIR/lib/python3.*/site-packages/torchvision/_meta_registrations.py   # without CUDA its operators don't load
    DIR/bin/python -m tests.families.golden.make_videos
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

HERE = Path(__file__).parent
TEXT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What happens?<|im_end|>\n"
SIZE = {"shortest_edge": 4096, "longest_edge": 65536}
CASES: list[dict[str, Any]] = [
    {"frames": 90, "height": 90, "width": 160, "rate": 30.0, "settings": {}},
    {"frames": 10, "height": 200, "width": 120, "rate": 29.97002997002997, "settings": {}},
    {"frames": 50, "height": 33, "width": 47, "rate": 24.0, "settings": {"fps": 4}},
    {"frames": 3, "height": 20, "width": 300, "rate": 1.0, "settings": {}},
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
]


def video(seed: int, frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Noise with blocks, so that resizing leaves something to see: (frames, height, width, 3)."""
    blocks = np.random.default_rng(seed).integers(0, 256, (frames, height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.kron(blocks, np.ones((1, 8, 8, 1), dtype=np.uint8))[:, :height, :width]


def main() -> None:
    """Writes both files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    bytes_vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=bytes_vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    found: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for number, case in enumerate(CASES):
        settings = {"size": SIZE, "cap_pixels_per_frame": False, **case["settings"]}
        videos = Qwen3VLVideoProcessor(**settings)
        processor = Qwen3VLProcessor(Qwen2VLImageProcessor(patch_size=16), tokenizer, videos)
        pixels = video(number, case["frames"], case["height"], case["width"])
        metadata = {"total_num_frames": case["frames"], "fps": case["rate"]}
        made = processor(
            text=[TEXT], videos=[pixels], video_metadata=[metadata], return_tensors="pt", return_metadata=True
        )
        text = tokenizer.decode(made["input_ids"][0], skip_special_tokens=False)
        every_byte = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
        mean, std = videos.image_mean, videos.image_std
        table = videos.rescale_and_normalize(every_byte, True, 1 / 255, True, mean, std)[0, :, 0]
        patches = made["pixel_values_videos"].reshape(-1, 3, 512)
        numbers = torch.stack(
            [torch.bucketize(patches[:, c].contiguous(), table[c].contiguous()) for c in range(3)], dim=1
        )
        for channel in range(3):
            assert torch.equal(table[channel][numbers[:, channel]], patches[:, channel])
        tensors |= {f"patches{number}": numbers.to(torch.uint8), f"table{number}": table.contiguous()}
        found.append(
            case
            | {
                "indices": [int(index) for index in made["video_metadata"][0].frames_indices],
                "grid": made["video_grid_thw"][0].tolist(),
                "text": re.sub(r"(?:<\|video_pad\|>)+", lambda run: f"<{len(run[0]) // 13} rows>", text),
            }
        )
    lines = ",\n".join(map(json.dumps, found))
    (HERE / "qwen3_vl_videos.json").write_text(f"[\n{lines}\n]\n")
    file = HERE / "qwen3_vl_videos.safetensors"
    save_file(tensors, file)
    file.chmod(0o644)


if __name__ == "__main__":
    main()
