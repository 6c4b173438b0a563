# ruff: noqa: E501
"""Small templates that render calls as those of released families do, and answers in each family's format."""

from dataclasses import dataclass

ARGUMENTS = {"city": 'Rö"m\ne', "days": 2, "dry": True, "tags": ["a", {"b": None}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "dry": {"type": "boolean"},
        "tags": {"type": "array"},
    },
}
JSON = '{"city": "Rö\\"m\\ne", "days": 2, "dry": true, "tags": ["a", {"b": null}]}'
"""ARGUMENTS as JSON."""


@dataclass(frozen=True)
class FormatCase:
    """One family."""

    reasoning: str | None
    """vLLM's name of the reasoning's parser that must be found."""
    calls: str
    """vLLM's name of the calls' parser that must be found."""
    template: str
    """What is rendered for a message: ``{0}`` stands for what the rest of the template is the same for."""
    answer: str
    """Reasoning "Hm." if the family has any, the text "Look." if it can be before calls, a call of weather with
    ARGUMENTS, and one of time with none if there can be several."""
    special: tuple[str, ...] = ()
    text: str = "Look."
    times: int = 1
    """How many calls of time there are."""


def chatml(
    call: str,
    *,
    start: str = "<|im_start|>{role}\n",
    end: str = "<|im_end|>\n",
    generation: str = "",
    before: str = "",
    after: str = "",
) -> str:
    """A template that writes each message between ``start`` and ``end``, and each call as ``call`` does."""
    begin = start.replace("{role}", "' ~ m.role ~ '")
    assistant = start.replace("{role}", "assistant")
    return (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}"
        f"{{{{ '{begin}' }}}}{{{{ m.content or '' }}}}"
        f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% endfor %}}{after}"
        f"{{% endif %}}{{{{ '{end}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{assistant}{generation}' }}}}{{% endif %}}"
    )


_THINK = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
_HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
_PARAMETERS = "{% for k, v in f.arguments | items %}"
_PLAIN = "{{ v if v is string else v | tojson }}"

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
GEMMA = ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>')
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)

CASES: dict[str, FormatCase] = {
    "qwen3": FormatCase(
        "qwen3",
        "hermes",
        chatml(_HERMES) + _THINK,
        f'<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    "qwen3.5": FormatCase(
        "qwen3",
        "qwen3_coder",
        chatml(
            f"<tool_call>\n<function={{{{ f.name }}}}>\n{_PARAMETERS}<parameter={{{{ k }}}}>\n{_PLAIN}\n</parameter>\n"
            "{% endfor %}</function>\n</tool_call>\n",
            generation="<think>\n",
        ),
        '<think>\nHm.\n</think>\n\nLook.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRö"m\ne\n</parameter>\n'
        "<parameter=days>\n2\n</parameter>\n<parameter=dry>\ntrue\n</parameter>\n<parameter=tags>\n"
        '["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n'
        "</tool_call>",
    ),
    "glm4.5": FormatCase(
        "qwen3",
        "glm45",
        chatml(
            f"\n<tool_call>{{{{ f.name }}}}\n{_PARAMETERS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_PLAIN}</arg_value>\n"
            "{% endfor %}</tool_call>",
            start="<|{role}|>\n",
            end="",
        )
        + _THINK,
        '\n<think>Hm.</think>\nLook.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rö"m\ne</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>dry</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", {"b": null}]</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>',
    ),
    "gpt-oss": FormatCase(
        "openai_gptoss",
        "openai",
        chatml(
            "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"
            "<|call|>",
            start="<|start|>{role}",
            end="",
        ).replace("{{ m.content or '' }}", "{% if m.content %}<|message|>{{ m.content }}<|end|>{% endif %}")
        + "{# <|channel|>analysis<|message|> #}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}",
        HARMONY,
    ),
    "mistral-7": FormatCase(
        None,
        "mistral",
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
        "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% endif %}{% endfor %}",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}, "id": "abcdefghi"}}, '
        '{"name": "time", "arguments": {}, "id": "abcdefghj"}]',
        ("[TOOL_CALLS]", "[INST]", "[/INST]"),
        text="",
    ),
    "mistral-11": FormatCase(
        "mistral",
        "mistral",
        "{# [THINK] #}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
        "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
        "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}",
        f"[THINK]Hm.[/THINK]Look.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]time[ARGS]{{}}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "llama3": FormatCase(
        None,
        "llama3_json",
        chatml(
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
            start="<|start_header_id|>{role}<|end_header_id|>\n\n",
            end="<|eot_id|>",
        ),
        f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "time", "parameters": {{}}}}',
        ("<|python_tag|>",),
        text="",
    ),
    "llama4": FormatCase(
        None,
        "pythonic",
        chatml(
            "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
            "{% endfor %}){% if not loop.last %}, {% endif %}",
            start="<|header_start|>{role}<|header_end|>\n\n",
            end="<|eot|>",
            before="[",
            after="]",
        ),
        "[weather(city='R\\u00f6\"m\\ne', days=2, dry=True, tags=[\"a\", {'b': None}]), time()]",
        text="",
    ),
    "gemma4": FormatCase(
        "gemma4",
        "gemma4",
        chatml(
            '<|tool_call>call:{{ f.name }}{{ "{" }}{% for k, v in f.arguments | items %}{{ k }}:'
            '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
            '{% if not loop.last %},{% endif %}{% endfor %}{{ "}" }}<tool_call|>',
            start="<|turn>{role}\n",
            end="<turn|>\n",
        )
        + "{% if enable_thinking is false %}<|channel>thought\n<channel|>{% endif %}",
        '<|channel>thought\nHm.\n<channel|>Look.<|tool_call>call:weather{city:<|"|>Rö"m\ne<|"|>,days:2,dry:true,'
        'tags:[<|"|>a<|"|>,{b:null}]}<tool_call|><|tool_call>call:time{}<tool_call|>',
        GEMMA,
    ),
    "deepseek-v3": FormatCase(
        None,
        "deepseek_v3",
        chatml(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
            start="<｜{role}｜>",
            end="",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
        f"Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        DEEPSEEK,
    ),
    "deepseek-v3.1": FormatCase(
        "qwen3",
        "deepseek_v31",
        chatml(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>",
            start="<｜{role}｜>",
            end="",
            generation="<think>",
            before="</think><｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
        "<think>Hm.</think>Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        DEEPSEEK,
    ),
    "kimi-k2": FormatCase(
        "qwen3",
        "kimi_k2",
        chatml(
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
            start="<|im_{role}|>",
            end="<|im_end|>",
            before="<think></think><|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        ),
        "<think>Hm.</think>Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        KIMI,
    ),
    "minimax-m1": FormatCase(
        None,
        "minimax",
        chatml(
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n',
            before="<tool_calls>\n",
            after="</tool_calls>",
        ),
        f'Look.\n<tool_calls>\n{{"name": "weather", "arguments": {JSON}}}\n{{"name": "time", "arguments": {{}}}}\n'
        "</tool_calls>",
    ),
    "minimax-m2": FormatCase(
        "qwen3",
        "minimax_m2",
        chatml(
            f'<invoke name="{{{{ f.name }}}}">\n{_PARAMETERS}<parameter name="{{{{ k }}}}">{_PLAIN}</parameter>\n{{% endfor %}}'
            "</invoke>\n",
            start="]~b]{role}\n",
            end="[e~[\n",
            generation="<think>\n",
            before="\n<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
        '<think>\nHm.\n</think>\n\nLook.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rö"m\ne'
        '</parameter>\n<parameter name="days">2</parameter>\n<parameter name="dry">true</parameter>\n'
        '<parameter name="tags">["a", {"b": null}]</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n'
        "</minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "phi4-mini": FormatCase(
        None,
        "phi4_mini_json",
        chatml(
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}',
            start="<|{role}|>",
            end="<|end|>",
            before="<|tool_call|>[",
            after="]<|/tool_call|>",
        ),
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "time", "arguments": {{}}}}]<|/tool_call|>',
        ("<|tool_call|>", "<|/tool_call|>"),
        text="",
    ),
    "internlm2.5": FormatCase(
        None,
        "internlm",
        chatml(
            '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|action_end|>\n'
        ),
        f'Look.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {JSON}}}<|action_end|>\n'
        '<|action_start|><|plugin|>\n{"name": "time", "parameters": {}}<|action_end|>\n',
        ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    ),
}
