"""A checkpoint folder whose weights are empty: byte-level tokenizer, Qwen-like template, small Qwen3-VL config."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for item in message.content %}
{%- if item.type == 'image' or 'image' in item %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in item %}
{{- item.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "text_config": {"max_position_embeddings": 4096, "eos_token_id": IDS["<|im_end|>"]},
    "vision_config": {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
    },
}
PREPROCESSOR_CONFIG: dict[str, Any] = {"size": {"shortest_edge": 256, "longest_edge": 4096}}


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_folder(folder: Path) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR_CONFIG))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "add_bos_token": False})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh folder, for tests that change it."""
    return write_folder(tmp_path)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    return write_folder(tmp_path_factory.mktemp("checkpoint"))
