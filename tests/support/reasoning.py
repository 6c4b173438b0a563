"""A service whose model knows of tools and thoughts: its template tells it of them, its tokenizer has their tags. Its
weights are random, so that tests make it say what they need with biases and grammars."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.checkpoints import DENSE, make_checkpoint
from tests.support.serving import Served, served

TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\\n' if enable_thinking else '<think></think>\\n' }}{% endif %}"""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
IDS = {tag: DENSE.vocabulary + number for number, tag in enumerate(TAGS)}


def make_thinking_checkpoint(folder: Path) -> Path:
    make_checkpoint(folder, sizes=replace(DENSE, vocabulary=DENSE.vocabulary + len(TAGS)))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": number, "content": tag, **plain} for tag, number in IDS.items()]
    path.write_text(json.dumps(tokenizer))
    return folder


@contextmanager
def thinking_service(folder: Path) -> Iterator[Served]:
    with served(make_thinking_checkpoint(folder)) as service:
        yield service
