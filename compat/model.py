"""A model whose chat template chooses its answers, so that a client's checks know every text in advance.

The weights are a table: a token of an answer leads to the next one, and the last to the end. Nothing else has an
effect, since the outputs of attention and MLP are zero. The chat template ends with a control token that leads to the
first token of the answer. Images pass through the vision tower of the bundled demo model.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "triptych" / "demo" / "model"
CONTEXT = 49152
"""Tokens; coding agents send up to 30,000 of instructions and tools."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the question that it is for: the first one that fits is given."""

    pieces: tuple[str, ...]
    """Each piece is one token, which no other answer has."""
    asked: str = ""
    """A text in the user's messages since the last answer, or in a tool's result."""
    tool: str = ""
    """A tool that the request must have."""
    result: bool = False
    """Whether it is for a tool's result."""


def call(asked: str, *calls: tuple[str, dict[str, Any]], result: bool = False) -> Answer:
    """An answer that calls tools with arguments, in Hermes' form."""
    pieces: list[str] = []
    for name, arguments in calls:
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        middle = text.rindex("}}") - 2  # within the arguments, behind what tells calls of a tool apart
        pieces += ["\n" * bool(pieces) + text[:middle], text[middle:]]
    return Answer(tuple(pieces), asked, calls[0][0], result)


SCRIPT = (
    Answer(("The tool", " answered."), result=True),
    call("weather", ("get_weather", {"city": "Paris"})),
    call("weather", ("exec_command", {"cmd": "echo sunny"})),
    call("weather", ("Bash", {"command": "echo sunny", "description": "Asks for the sky"})),
    call("weather", ("bash", {"command": "echo sunny", "description": "Asks for the sky"})),
    call("weather", ("run_commands", {"commands": ["echo sunny"]})),
)
TEXTS = {
    "hello": ("Hello", " from Triptych."),
    "again": ("Hello again", "."),
    "picture": ("I see", " a picture."),
}
"""Answers to what the script doesn't have: to a first message, to later ones, and to pictures."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
WIDTH = 256
"""Numbers of a hidden state: more than the tokens that lead to others."""
MERGED = 4096
"""Tokens of the trained vocabulary, before those of answers."""
USUAL = {"}": 5.0, "]": 4.0, '"': 3.0, "0": 2.0, "e": 1.0}
"""Where a grammar forbids the answer: the shortest JSON."""

THOUGHT = ("<think>\nThe question is for {name}", ", so {name} it is.\n</think>\n\n")
"""Tokens before every answer of a model that thinks."""

TEMPLATE = """\
{%- set turn = namespace(answered=false, image=false, later=false, seen=false, text='', answer='') %}
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set turn.later = true %}{% set turn.answered = false %}{% set turn.image = false %}{% set turn.text = '' %}
    {%- elif message.role == 'tool' %}
        {%- set turn.answered = true %}
    {%- endif %}
    {%- set counts = message.role in ('user', 'tool') %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
        {%- if counts %}{% set turn.text = turn.text + message.content %}{% endif %}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type in ('image', 'image_url') %}
                {%- set turn.image = true %}{% set turn.seen = true %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
                {%- if counts %}{% set turn.text = turn.text + part.text %}{% endif %}
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
    {%- for rule in SCRIPT if not turn.answer and rule.result == turn.answered and rule.asked in turn.text
            and (not rule.tool or rule.tool in names) %}
        {%- set turn.answer = rule.name %}
    {%- endfor %}
    {%- if not turn.answered and (turn.image or (turn.seen and 'picture' in turn.text)) %}
        {%- set turn.answer = 'picture' %}
    {%- endif %}
    {%- set turn.answer = turn.answer or ('again' if turn.later else '') %}
    {%- if THINKS and not (enable_thinking is defined and not enable_thinking) %}
        {{- '<|thinks ' + (turn.answer or 'hello') + '|>' }}
    {%- elif turn.answer %}
        {{- '<|' + turn.answer + '|>' }}
    {%- endif %}
{%- endif %}
"""
"""Ends with the token of an answer; without one, the answer is hello."""


def build(
    folder: Path,
    script: tuple[Answer, ...] = SCRIPT,
    *,
    context: int = CONTEXT,
    endless: bool = False,
    thinks: bool = False,
) -> None:
    """Writes the checkpoint into ``folder``, which is made if it is missing.

    ``context`` is in tokens. With ``endless`` it goes on with hello until the request's limit, and sampling varies
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chains = TEXTS | {f"answer {number}": answer.pieces for number, answer in enumerate(script)}
    if thinks:
        thoughts = {name: tuple(part.format(name=name) for part in THOUGHT) for name in chains}
        chains |= {f"thinks {name}": (*thoughts[name], *pieces) for name, pieces in chains.items()}
    tokenizer, tokens = _tokenizer(chains)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(tokenizer, context)
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": config["text_config"]["eos_token_id"]}
    )
    _write(
        folder / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend"},
    )
    shutil.copy(DEMO / "preprocessor_config.json", folder)
    rules = [
        {"asked": rule.asked, "tool": rule.tool, "result": rule.result, "name": f"answer {number}"}
        for number, rule in enumerate(script)
    ]
    template = TEMPLATE.replace("SCRIPT", json.dumps(rules)).replace("THINKS", str(thinks).lower())
    (folder / "chat_template.jinja").write_text(template)
    save_file(_weights(config, tokenizer, tokens, endless), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(chains: dict[str, tuple[str, ...]]) -> tuple[Tokenizer, dict[str, list[int]]]:
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
    for name, pieces in chains.items():
        tokens = [_spelled(piece) for piece in pieces]
        answers[f"<|{name}|>"] = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.add_special_tokens([*SPECIAL, *answers])
    return tokenizer, answers


def _spelled(text: str) -> str:
    """``text`` as one token of a byte-level vocabulary."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(token for token, _ in level.pre_tokenize_str(text))


def _config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """The demo model's configuration with another vocabulary, two small layers and another context."""
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    for name in ("image", "video"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}_pad|>")
    for name in ("vision_start", "vision_end"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}|>")
    config["tie_word_embeddings"] = False
    config["vision_config"]["out_hidden_size"] = WIDTH
    config["text_config"] |= {
        "tie_word_embeddings": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": WIDTH,
        "max_position_embeddings": context,
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
    config: dict[str, Any], tokenizer: Tokenizer, answers: dict[str, list[int]], endless: bool
) -> dict[str, NDArray[np.float16]]:
    """The demo model's vision tower, layers without effect, and a table of tokens and their followers.

    Each token with a follower has one dimension of the hidden states; dimension 0 is every token's.
    """
    text = config["text_config"]
    width, end, hello = text["hidden_size"], text["eos_token_id"], answers["<|hello|>"][0]
    known: dict[str, int] = tokenizer.get_vocab()
    followers: dict[int, list[int]] = {}
    for control, ids in answers.items():
        chain = [known[control], *ids, hello if endless else end]
        for place, token in enumerate(chain[:-1], start=1):
            if followers.setdefault(token, chain[place:]) != chain[place:]:
                raise ValueError(f"two answers have the token {tokenizer.id_to_token(token)!r}")
    embeddings = np.zeros((text["vocab_size"], width), np.float16)
    head = np.zeros_like(embeddings)
    embeddings[:, 0] = 1
    head[hello, 0] = 8  # where no token of the prompt chooses another answer
    head[end, 0] = 7
    for piece, weight in USUAL.items():
        head[known[piece], 0] = weight
    for dimension, (token, rest) in enumerate(followers.items(), start=1):
        embeddings[token, dimension] = 4
        if rest[0] == end:
            # in JSON, the answer ends with its string
            head[known['"'], dimension] = 4
        for distance, follower in enumerate(rest[:3]):
            if follower != end or not distance:
                head[follower, dimension] = 8 - 3 * distance  # where a grammar forbids a piece, the next one
    if endless:
        head /= 10  # sampling takes other tokens, too, but none that ends or isn't text
        head[[known[token] for token in (*SPECIAL, *answers)], 0] = -8
    weights = {name: weight for name, weight in load_file(DEMO / "model.safetensors").items() if "visual" in name}
    for name in [name for name in weights if "merger" in name and "fc2" in name]:
        weights[name] = np.pad(weights[name], [(0, width - len(weights[name])), *[(0, 0)] * (weights[name].ndim - 1)])
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
