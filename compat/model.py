"""A model whose chat template chooses its answers, so that a client's checks know every text in advance.

The weights are a table: a token of an answer leads to the next one, and the last to the end. Nothing else has an
effect, since the outputs of attention and MLP are zero. The chat template ends with a control token that leads to the
first token of the answer. Images pass through the vision tower of the bundled demo model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "triptych" / "demo" / "model"
CONTEXT = 131072
"""Tokens; coding agents send up to 30,000 of instructions and tools."""
TEXTS = {
    "hello": ["Hello", " from Triptych."],
    "again": ["Hello again", "."],
    "picture": ["I see", " a picture."],
    "tool": ["The tool", " answered."],
}
"""Pieces of each answer. Each piece is one token, and no two answers share one."""
CALLS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": "Paris"},
    "exec_command": {"cmd": "echo sunny"},
    "Bash": {"command": "echo sunny", "description": "Asks for the sky"},
    "bash": {"command": "echo sunny", "description": "Asks for the sky"},
    "run_commands": {"commands": ["echo sunny"]},
}
"""Tools that are called if the request has them, and the calls' arguments."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
MERGED = 4096
"""Tokens of the trained vocabulary, before those of answers."""
USUAL = {"}": 5.0, "]": 4.0, '"': 3.0, "0": 2.0, "e": 1.0}
"""Where a grammar forbids the answer: the shortest JSON."""

TEMPLATE = """\
{%- set turn = namespace(answered=false, image=false, asked=false, later=false, call='', seen=false, picture=false) %}
{%- for tool in tools or [] %}
    {%- if tool.function.name in CALLS and not turn.call %}{% set turn.call = tool.function.name %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set turn.later = true %}
        {%- set turn.answered = false %}{% set turn.image = false %}{% set turn.asked = false %}
        {%- set turn.picture = false %}
    {%- elif message.role == 'tool' %}
        {%- set turn.answered = true %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
        {%- if message.role == 'user' and 'weather' in message.content %}{% set turn.asked = true %}{% endif %}
        {%- if message.role == 'user' and 'picture' in message.content %}{% set turn.picture = true %}{% endif %}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type in ('image', 'image_url') %}
                {%- set turn.image = true %}{% set turn.seen = true %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
                {%- if message.role == 'user' and 'weather' in part.text %}{% set turn.asked = true %}{% endif %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if turn.answered %}{{ '<|tool|>' }}
    {%- elif turn.image or (turn.seen and turn.picture) %}{{ '<|picture|>' }}
    {%- elif turn.asked and turn.call %}{{ '<|' + turn.call + '|>' }}
    {%- elif turn.later %}{{ '<|again|>' }}
    {%- else %}{{ '<|hello|>' }}
    {%- endif %}
{%- endif %}
"""


def build(folder: Path) -> None:
    """Writes the checkpoint into ``folder``, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, answers = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(tokenizer)
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": config["text_config"]["eos_token_id"]}
    )
    _write(
        folder / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend"},
    )
    shutil.copy(DEMO / "preprocessor_config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("in CALLS", f"in {list(CALLS)}"))
    save_file(_weights(config, tokenizer, answers), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> tuple[Tokenizer, dict[str, list[int]]]:
    """A byte-level BPE trained on the documentation; ids of each answer's pieces, by its control token.

    No merge makes the pieces, so texts never contain them.
    """
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    pages = sorted(str(page) for page in (ROOT / "docs").glob("*.md"))
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train(pages, trainer)
    saved = json.loads(tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    answers: dict[str, list[int]] = {}
    for name, pieces in _answers().items():
        tokens = [_spelled(piece) for piece in pieces]
        answers[f"<|{name}|>"] = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.add_special_tokens([*SPECIAL, *answers])
    return tokenizer, answers


def _answers() -> dict[str, list[str]]:
    """Pieces of every answer: texts, and calls in the form of Hermes."""
    calls = {
        name: [f'<tool_call>\n{{"name": "{name}", "arguments": ', json.dumps(arguments), "}\n</tool_call>"]
        for name, arguments in CALLS.items()
    }
    return TEXTS | calls


def _spelled(text: str) -> str:
    """``text`` as one token of a byte-level vocabulary."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(token for token, _ in level.pre_tokenize_str(text))


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The demo model's configuration with another vocabulary, two small layers and a long context."""
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    for name in ("image", "video"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}_pad|>")
    for name in ("vision_start", "vision_end"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}|>")
    config["tie_word_embeddings"] = False
    config["text_config"] |= {
        "tie_word_embeddings": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": len(config["vision_config"]["deepstack_visual_indexes"]),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    return config


def _weights(
    config: dict[str, Any], tokenizer: Tokenizer, answers: dict[str, list[int]]
) -> dict[str, NDArray[np.float16]]:
    """The demo model's vision tower, layers without effect, and a table of tokens and their followers.

    Each token with a follower has one dimension of the hidden states; dimension 0 is every token's.
    """
    text = config["text_config"]
    width, end = text["hidden_size"], text["eos_token_id"]
    followers = {token: follower for control, ids in answers.items() for token, follower in zip(
        [tokenizer.token_to_id(control), *ids], [*ids, end], strict=True)}  # fmt: skip
    embeddings = np.zeros((text["vocab_size"], width), np.float16)
    head = np.zeros_like(embeddings)
    embeddings[:, 0] = 1
    head[answers["<|hello|>"][0], 0] = 8
    head[end, 0] = 7
    for piece, weight in USUAL.items():
        head[tokenizer.token_to_id(piece), 0] = weight
    for dimension, (token, follower) in enumerate(followers.items(), start=1):
        embeddings[token, dimension] = 4
        head[follower, dimension] = 8
        if follower == end:
            # in JSON, the answer ends with its string
            head[tokenizer.token_to_id('"'), dimension] = 4
    weights = {name: weight for name, weight in load_file(DEMO / "model.safetensors").items() if "visual" in name}
    weights |= {
        "model.language_model.embed_tokens.weight": embeddings,
        "model.language_model.norm.weight": np.ones(width, np.float16),
        "lm_head.weight": head,
    }
    for layer in range(text["num_hidden_layers"]):
        weights |= _layer(f"model.language_model.layers.{layer}", width, text["head_dim"], text["intermediate_size"])
    return weights


def _layer(name: str, width: int, head: int, inner: int) -> dict[str, NDArray[np.float16]]:
    """A layer whose outputs are zero."""
    shapes = {
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "self_attn.q_proj": (head, width),
        "self_attn.k_proj": (head, width),
        "self_attn.v_proj": (head, width),
        "self_attn.o_proj": (width, head),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width, "self_attn.q_norm": head,
             "self_attn.k_norm": head}  # fmt: skip
    return {f"{name}.{part}.weight": np.zeros(shape, np.float16) for part, shape in shapes.items()} | {
        f"{name}.{part}.weight": np.ones(size, np.float16) for part, size in norms.items()
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
