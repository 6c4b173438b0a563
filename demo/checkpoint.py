"""The demo model's architecture, and its folder in the layout of Hugging Face checkpoints."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from demo.chat import CHAT_TEMPLATE, END_OF_TEXT, IMAGE, TURN_END, VIDEO, VISION_END, VISION_START, special
from demo.preprocess import MERGE, PATCH, PROCESSOR_CONFIG, TEMPORAL

HIDDEN = 192
MAX_TOKENS = 2048


def model_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """Return the config of a Qwen3-VL with about 5 million parameters and the tokenizer's special tokens."""
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "pad_token_id": special(tokenizer, END_OF_TEXT),
        "bos_token_id": special(tokenizer, END_OF_TEXT),
        "eos_token_id": special(tokenizer, TURN_END),
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_heads": 5,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        # Learned positions on a 12 x 12 grid, interpolated to the size of each picture.
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [1, 2],
        "initializer_range": 0.05,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=special(tokenizer, IMAGE),
        video_token_id=special(tokenizer, VIDEO),
        vision_start_token_id=special(tokenizer, VISION_START),
        vision_end_token_id=special(tokenizer, VISION_END),
        tie_word_embeddings=True,
    )


def save(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model, rounded to float16, with all other files that a server needs."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = Qwen3VLForConditionalGeneration(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.half()
    rounded.generation_config.update(
        do_sample=False,
        eos_token_id=[special(tokenizer, TURN_END), special(tokenizer, END_OF_TEXT)],
        pad_token_id=special(tokenizer, END_OF_TEXT),
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_CONFIG, indent=2) + "\n")
