"""All formats, and which of them a model has: found from its template and vocabulary, or named by vLLM's names."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.errors import ConfigError, InvalidRequest
from triptych.prompt.formats.base import Format, Tools
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.constrain import CallWriter
from triptych.prompt.formats.deepseek import DeepSeek, DeepSeekV31
from triptych.prompt.formats.events import ToolCallArguments, ToolCallStart
from triptych.prompt.formats.gemma4 import FunctionGemma, GemmaCalls
from triptych.prompt.formats.glm import Glm
from triptych.prompt.formats.harmony import CHANNEL, MESSAGE, Harmony
from triptych.prompt.formats.hermes import GraniteFunctions, Hermes, LongCat
from triptych.prompt.formats.internlm import InternLm
from triptych.prompt.formats.json_list import Granite, Xlam
from triptych.prompt.formats.kimi import Kimi
from triptych.prompt.formats.llama import Lfm2, Llama, Olmo3, Pythonic
from triptych.prompt.formats.minimax import DeepSeekV4, DeepSeekV32, Dots, MiniMaxM1, MiniMaxM2, Step3
from triptych.prompt.formats.mistral import Mistral
from triptych.prompt.formats.parser import AnswerParser
from triptych.prompt.formats.phi4 import Phi4
from triptych.prompt.formats.qwen_xml import QwenXml, SeedOss
from triptych.prompt.formats.reasoning import ASSUMED, TAGS, Reasoning, ReasoningTags
from triptych.prompt.formats.tool_call_tag import ToolCallTag

FORMATS: tuple[Format, ...] = (
    Harmony(),
    Mistral(),
    DeepSeek(),
    DeepSeekV31(),
    DeepSeekV32(),
    DeepSeekV4(),
    Kimi(),
    MiniMaxM2(),
    MiniMaxM1(),
    Dots(),
    Step3(),
    GemmaCalls(),
    FunctionGemma(),
    Phi4(),
    InternLm(),
    QwenXml(),
    SeedOss(),
    Glm(),
    Hermes(),
    LongCat(),
    GraniteFunctions(),
    Lfm2(),
    Olmo3(),
    Pythonic(),
    Llama(),
    Granite(),
    Xlam(),
)
"""In the order in which they are tried on what a template renders."""

NOT_SERVED = {
    "--reasoning-parser": (
        *("beam", "cohere_command3", "cohere_command4", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling"),
        *("k2_horizon", "kimi_k3", "ling3", "minimax_m3", "muse", "muse_glimmer", "musespark1x", "plamo3"),
    ),
    "--tool-call-parser": (
        *("apertus", "beam", "cohere_command3", "cohere_command4", "gigachat3", "hf", "hy_v3", "hy_v4", "inkling"),
        *("k2_horizon", "kimi_k3", "ling3", "minicpm5", "minimax_m3", "muse", "muse_glimmer", "musespark1x", "plamo3"),
    ),
}
"""Names of vLLM 0.33's parsers whose formats are none of these."""
OTHER_NAMES = {
    "--reasoning-parser": {
        "gpt-oss": "openai_gptoss",
        "kimi": "kimi_vl",
        "qwen3-thinking": "deepseek_r1",
        "minimax": "minimax_m2",
        "minimax-append-think": "minimax_m2_append_think",
        "nemotron_3": "nemotron_v3",
        "interns1": "qwen3",
    },
    "--tool-call-parser": {
        "gpt-oss": "openai",
        "llama3": "llama3_json",
        "qwen": "hermes",
        "qwen25": "hermes",
        "glm": "glm45",
    },
}
"""SGLang's names, where they aren't vLLM's in another spelling."""


class Vocabulary(Protocol):
    """What is read of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def token_of(self, token_id: int) -> str | None: ...


Render = Callable[..., str]
"""``ChatTemplate.render``."""


@dataclass(frozen=True)
class Formats:
    """How a model's answers are written."""

    reasoning: tuple[ReasoningTags, ...]
    """Tags that its reasoning may be between."""
    calls: tuple[Format, ...]
    """Formats that its calls may have. The first is that of calls that a request demands."""
    reasons: bool
    """Whether its template knows of reasoning, so that prompts say whether an answer begins with any."""
    special: Mapping[str, int]
    """Markers of these formats that are special tokens, with their ids."""
    assumed: bool = False
    """Whether answers begin within reasoning if the prompt doesn't say."""

    @property
    def reasoning_parser(self) -> str | None:
        """vLLM's name for how reasoning is found; None if the model isn't known to reason."""
        return self.reasoning[0].parsers[0] if self.reasons else None

    @property
    def tool_call_parser(self) -> str | None:
        """vLLM's name for how calls are found; None if their form isn't known."""
        return self.calls[0].parsers[0] if self.calls[0].parsers else None

    def parser(self, reasoning: Reasoning, tools: Tools, *, skip_special_tokens: bool = True) -> AnswerParser:
        """Return a parser for one answer. Without ``skip_special_tokens`` stray markers are text."""
        special = self.special if skip_special_tokens else ()
        return AnswerParser(reasoning, self.reasoning, self.calls, tools, special)

    @property
    def writer(self) -> CallWriter:
        """What writes grammars of calls."""
        openers = [opener for one in self.calls for opener in one.openers]
        return CallWriter(self._form, self.special, openers)

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, each a name and its arguments."""
        return self._form.text(calls)

    @property
    def _form(self) -> CallForm:
        return self.calls[0].form_for(self.special)

    def with_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation with the ids that calls of the history have in this format, and their results."""
        renamed: dict[Any, str] = {}
        shown: list[Mapping[str, Any]] = []
        for message in messages:
            changed = dict(message)
            if calls := message.get("tool_calls"):
                ids = [
                    self.calls[0].call_id(call["id"], call["function"]["name"], len(renamed) + place)
                    for place, call in enumerate(calls)
                ]
                renamed |= {call["id"]: new for call, new in zip(calls, ids, strict=True)}
                changed["tool_calls"] = [call | {"id": new} for call, new in zip(calls, ids, strict=True)]
            if (old := message.get("tool_call_id")) in renamed:
                changed["tool_call_id"] = renamed[old]
            shown.append(changed)
        return shown

    def reasoning_at_end(self, prompt: str, continued: str | None = None) -> Reasoning:
        """Return whether the answer to a prompt begins with reasoning: templates may end with an opening tag, or with
        empty reasoning to prevent any. ``continued`` is the text of a message that the prompt ends with: its last tag
        counts."""
        if not self.reasons:
            return Reasoning.NONE
        opens = tuple(one.open.strip() for one in self.reasoning)
        closes = tuple(one.close for one in self.reasoning)
        end = prompt.rstrip()
        if continued and not end.endswith((*opens, *closes)):
            opened, closed = (max(map(continued.rfind, tags)) for tags in (opens, closes))
            return Reasoning.CONTINUED if opened > closed else Reasoning.NONE
        if end.endswith(opens):
            return Reasoning.OPEN
        if end.endswith(closes):
            return Reasoning.NONE
        return Reasoning.OPEN if self.assumed else Reasoning.POSSIBLE


def find_formats(
    render: Render, source: str, tokenizer: Vocabulary, reasoning_parser: str = "", tool_call_parser: str = ""
) -> Formats:
    """Return a model's formats. ``source`` is the text of its templates; the parsers are vLLM's names for what is
    decided otherwise. Raises ConfigError for a name that isn't known."""
    known = _special_markers(tokenizer)
    reasoning_parser = _vllms_name(TAGS, reasoning_parser, "--reasoning-parser")
    tool_call_parser = _vllms_name(FORMATS, tool_call_parser, "--tool-call-parser")
    if reasoning_parser:
        tags = _named(TAGS, reasoning_parser, "--reasoning-parser")
        reasons = True
    else:
        written = tuple(one for one in TAGS if one.open.strip() in source)
        tags = written + tuple(one for one in TAGS if one.open.startswith(tuple(known)) and one not in written)
        reasons = bool(written)
    if tool_call_parser:
        calls = _named(FORMATS, tool_call_parser, "--tool-call-parser")
    else:
        calls = _rendered(render) or _in_vocabulary(known)
    harmony = next(one for one in FORMATS if isinstance(one, Harmony))
    if harmony not in calls and {CHANNEL, MESSAGE} <= known.keys():
        calls = (*calls, harmony)
    markers = {one for form in calls for one in (*form.openers, *form.closers)}
    for one in tags:
        markers |= {one.open, one.close}
    special = {name: number for name, number in known.items() if any(one.startswith(name) for one in markers)}
    return Formats(tags, calls, reasons, special, assumed=reasoning_parser in ASSUMED)


def parser_names() -> tuple[list[str], list[str]]:
    """Return vLLM's names of parsers for reasoning and for calls."""
    tags, calls = ({name for one in known for name in one.parsers} for known in (TAGS, FORMATS))
    return sorted(tags), sorted(calls)


def _vllms_name(known: Sequence[Any], name: str, flag: str) -> str:
    """Return vLLM's name of a parser that SGLang has under another one, or in another spelling."""
    name = OTHER_NAMES[flag].get(name, name)
    names: dict[str, str] = {_squeezed(each): each for one in known for each in one.parsers}
    return names.get(_squeezed(name), name)


def _squeezed(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def _named(known: Sequence[Any], name: str, flag: str) -> tuple[Any, ...]:
    found = tuple(one for one in known if name in one.parsers)
    if not found and name in NOT_SERVED[flag]:
        raise ConfigError(f"{flag} {name}: vLLM's format of that name is not served")
    if not found:
        names = sorted({each for one in known for each in one.parsers})
        raise ConfigError(f"{flag} {name} is not one of {', '.join(names)}")
    return found


def _special_markers(tokenizer: Vocabulary) -> dict[str, int]:
    """Return the special tokens that markers of any format begin with, the longest first."""
    markers = {one for form in FORMATS for one in (*form.openers, *form.closers)}
    markers |= {tag for one in TAGS for tag in (one.open, one.close)}
    texts = {tokenizer.token_of(number) or "": number for number in tokenizer.special_ids}
    found = {text: number for text, number in texts.items() if text and any(one.startswith(text) for one in markers)}
    return dict(sorted(found.items(), key=lambda one: -len(one[0])))


def _in_vocabulary(known: Mapping[str, int]) -> tuple[Format, ...]:
    """Return the formats whose calls begin with a special token of the vocabulary, those with the most of their
    markers there first, and the widespread ones."""
    tag, found = ToolCallTag(), list[Format]()
    for one in sorted(FORMATS, key=lambda form: len(set(form.closers) - known.keys())):
        taken = {opener for form in (tag, *found) for opener in form.openers}
        if not one.always and set(one.openers) & known.keys() - taken:
            found.append(one)
    return (*found, tag)


# ── what the template renders ────────────────────────────────────────────────────────────────────────────────────

_NAME = "probe_weather"
_ARGUMENTS = {"city": "Rome", "days": 2}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
_IDS = ("probeid01", f"functions.{_NAME}:0", "call_probeid01")


def _rendered(render: Render) -> tuple[Format, ...]:
    """Return the format in which the template renders a call of the history; none if that is none of them."""
    for text in _histories(render):
        for form in FORMATS:
            if _finds(form, text):
                return (form,)
    return ()


def _histories(render: Render) -> Iterator[str]:
    """Yield what the template renders after the beginning of an answer for a history with a call, for each form of
    ids, arguments and contents that templates take."""
    question = {"role": "user", "content": "Hi"}
    try:
        before = render([question], tools=[_TOOL])
    except InvalidRequest:
        return
    tags = [tag.strip() for one in TAGS for tag in (one.close, one.open)]
    while tag := next((tag for tag in tags if before.rstrip().endswith(tag)), ""):
        before = before.rstrip().removesuffix(tag)
    for call_id in _IDS:
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            for content in ("", None):
                call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                result = {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": "sunny"}
                try:
                    text = render([question, answer, result], tools=[_TOOL])
                except InvalidRequest:
                    continue
                same = next((at for at, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), None)
                yield text[len(before) if same is None else same :]


def _finds(form: Format, text: str) -> bool:
    """Return whether the format has the call in a text."""
    parser = AnswerParser(Reasoning.POSSIBLE, TAGS, (form,), {_NAME: _TOOL["function"]["parameters"]})  # type: ignore[index]
    events = parser.push(text) + parser.finish()
    names = [one.name for one in events if isinstance(one, ToolCallStart)]
    arguments = "".join(one.text for one in events if isinstance(one, ToolCallArguments))
    try:
        return names == [_NAME] and form.mark in text and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False
