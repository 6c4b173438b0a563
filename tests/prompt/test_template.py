import contextlib
import json
from pathlib import Path

import pytest

from tests.support.timing import cpu_seconds
from triptych.errors import CheckpointError, InvalidRequest
from triptych.prompt import bounded_jinja
from triptych.prompt.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def template(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder)


def test_renders_text_and_images(shared_folder: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what is {{ this }}?"}]
    assert ChatTemplate(shared_folder).render([{"role": "user", "content": content}]) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what is {{ this }}?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ChatTemplate(shared_folder).render(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_sources_in_order(folder: Path) -> None:
    def write(name: str, template: object) -> None:
        (folder / name).write_text(json.dumps({"chat_template": template}))

    (folder / "chat_template.jinja").unlink()
    without = ChatTemplate(folder)
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        without.render(USER)
    write("chat_template.json", "legacy")
    assert ChatTemplate(folder).render(USER) == "legacy"
    write("tokenizer_config.json", [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}])
    assert ChatTemplate(folder).render(USER) == "named"
    write("tokenizer_config.json", {"rag": "no"})
    with pytest.raises(InvalidRequest, match="it has rag"):
        ChatTemplate(folder).render(USER)
    assert template(folder, "file").render(USER) == "file"


def test_a_template_for_tools(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}{{ depth }}")
    both = template(folder, "plain{{ mood }}")
    assert both.supports_tools
    assert both.variables == {"mood", "depth"}
    assert both.render(USER, tools=["a tool"]) == "a tool"
    assert both.render(USER, tools=[]) == "plain"


def test_a_template_for_tools_alone(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}")
    (folder / "chat_template.jinja").unlink()
    alone = ChatTemplate(folder)
    assert alone.supports_tools
    assert alone.render(USER, tools=["a tool"]) == "a tool"
    with pytest.raises(InvalidRequest, match="it has tool_use"):
        alone.render(USER)


ON_SYSTEM = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% if m.tools %}{{ SHOWN }}{% endif %}]{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("shown", ["'<' + m.tools + '>'", "'<' ~ m.tools ~ '>'", "'<' + m.tools | tojson + '>'"])
def test_tools_on_a_system_message(folder: Path, shown: str) -> None:
    takes = template(folder, ON_SYSTEM.replace("SHOWN", shown))
    assert takes.supports_tools
    system = {"role": "system", "content": "S"}
    function = '<[{"name": "f", "parameters": {}}]>'
    assert takes.render([system, *USER], tools=[TOOL]).startswith(f"[system:S{function}][user:")
    assert takes.render(USER, tools=[TOOL]).startswith(f"[system:{function}][user:")
    assert takes.render([system, *USER]).startswith("[system:S][user:")
    assert not template(folder, "{# tools #}{{ messages[0].content }}").supports_tools


SPECIAL_TOKENS = [
    ({}, {"bos_token": "<s>"}, "<s>"),
    ({"bos_token": None}, {"bos_token": {"content": "<s>", "lstrip": False}}, "<s>"),
    ({"bos_token": {"__type": "AddedToken", "content": "<b>"}}, {"bos_token": "<s>"}, "<b>"),
    ({"extra_special_tokens": {"bos_token": "<x>"}}, {}, "<x>"),
    ({"extra_special_tokens": ["<x>"], "model_specific_special_tokens": {"bos_token": "<m>"}}, {}, "<m>"),
    ({"bos_token": ["<x>"]}, {}, ""),
]


@pytest.mark.parametrize(("config", "special_tokens_map", "expected"), SPECIAL_TOKENS)
def test_special_tokens_are_named(folder: Path, config: object, special_tokens_map: object, expected: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    assert template(folder, "{{ bos_token }}").render(USER) == expected


def test_variables_and_filters(folder: Path) -> None:
    source = (
        "{{ eos_token }}{{ pad_token }}{{ add_bos_token is defined }}{{ tools is none }}{{ {'a': '<é>'} | tojson }}"
    )
    assert template(folder, source).render(USER) == '<|im_end|><|endoftext|>FalseTrue{"a": "<é>"}'
    assert template(folder, "{{ tools | length }}").render(USER, tools=[1, 2]) == "2"
    assert len(template(folder, "{{ strftime_now('%Y-%m-%d') }}").render(USER)) == 10
    assert template(folder, "{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}").render(USER) == "1"
    assert template(folder, "{% generation %}{{ messages[0].content }}{% endgeneration %}").render(USER) == "hi"


def test_blocks_leave_no_blank_lines(folder: Path) -> None:
    assert template(folder, "{% if true %}\n  {% if true %}\na\n  {% endif %}\n{% endif %}\n").render(USER) == "a\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[0].missing.attribute }}", "no attribute"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_errors_are_short_requests_errors(folder: Path, source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        template(folder, source).render(USER)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300


def test_template_that_does_not_parse(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="doesn't parse"):
        template(folder, "{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% if a.x %}{% endif %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ '' }}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_templates_that_would_take_forever(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(bounded_jinja, "SECONDS", 0.2)
    hostile = template(folder, source)

    def render() -> None:
        with pytest.raises(InvalidRequest, match=r"more than|too l"):
            hostile.render(USER * 2000)

    assert cpu_seconds(render) < 5
    assert template(folder, "{{ 2 ** 3 }}{{ 'ab' * 2 }}").render(USER) == "8abab"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_cannot_get_out(folder: Path, source: str) -> None:
    messages = [dict(USER[0])]
    with contextlib.suppress(InvalidRequest):
        assert template(folder, source).render(messages) == ""
    assert messages == USER
