"""Finds out by trial what a chat template takes: it renders conversations with words of its own and looks for them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import InvalidRequest

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]
Places = Mapping[str, tuple[Message, str]]
"""By modality: a part, and the text that a template makes of it."""

SYSTEM, USER, ASSISTANT, CALLS, TOOL = "system", "user", "assistant", "calls", "tool"
"""Kinds of messages: the roles, and ``calls`` for an assistant's message with tool calls."""
_AROUND = {
    SYSTEM: ((SYSTEM, USER), 0),
    USER: ((USER,), 0),
    ASSISTANT: ((USER, ASSISTANT, USER), 1),
    CALLS: ((USER, CALLS, TOOL), 1),
    TOOL: ((USER, CALLS, TOOL), 2),
}
"""For each kind: a plain conversation with such a message, and its place."""
_WORD, _MORE = "dolor_xq", "magna_xq"
"""The contents on trial."""
_IDS, _LONG_ID = ("q1w2e3r4t", "z9x8c7v6b"), "call_q1w2e3r4t5y6u7i8"
_NAMES = ("veniam_xq", "aliquip_xq")
_ARGUMENTS = {"nostrud_xq": "ullamco_xq"}
PROBE_TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "lorem_tool",
            "description": "Lorem.",
            "parameters": {"type": "object", "properties": {"lorem": {"type": "string"}}},
        },
    }
]
"""The tools of conversations on trial."""


@dataclass(frozen=True)
class Forms:
    """What a template takes. The defaults are for one that can't be judged: everything."""

    strings: frozenset[str] = frozenset(_AROUND)
    """Kinds of messages whose content it shows if that is a string."""
    lists: frozenset[str] = frozenset(_AROUND)
    """Kinds of messages whose content it shows if that is a list of texts."""
    lost: frozenset[str] = frozenset()
    """Kinds of messages whose content it omits without an error."""
    media: Mapping[str, frozenset[str]] | None = None
    """Modalities that it has a place for in a list, by the kind of the message. None if that isn't known."""
    leading_systems: bool = True
    """Whether several system messages may begin a conversation."""
    later_systems: bool = True
    """Whether a system message may follow others."""
    users: bool = True
    """Whether a user's message may follow another."""
    assistants: bool = True
    """Whether an assistant's message may follow another."""
    shows_calls: bool = True
    """Whether it shows calls or, being made for tools, at least their results."""
    calls_after_text: bool = False
    """Whether a message with calls may follow one of the assistant with text."""
    several_calls: bool = True
    """Whether it shows all calls of a message, or raises an error."""
    arguments_as_text: bool = False
    """Whether a call's arguments are JSON, not an object."""
    only_objects: bool = False
    """Whether arguments that are no object can't be shown."""
    empty_content: str | None = ""
    """The content of a message with calls alone."""
    short_ids: bool = False
    """Whether ids of calls must be nine letters and digits."""
    shows_reasoning: bool = False
    """Whether it shows the reasoning of a last message without content."""


def find_forms(render: Render, places: Places, *, takes_tools: bool) -> Forms:
    """Return what a template takes. ``render`` renders a conversation with it, and raises InvalidRequest if the
    template does. ``takes_tools``: it reads the tools of a request."""
    trial = _Trial(render, as_string=True, takes_tools=takes_tools)
    strings, lists = trial.shows_string(USER), trial.shows_list(USER)
    if not strings and not lists:
        return Forms()
    trial.as_string = strings
    if trial.shows(USER, ASSISTANT, USER):
        return trial.forms(places)
    # it shows the last message alone, or wants more than messages
    all_kinds, none = frozenset(_AROUND), frozenset[str]()
    media = dict.fromkeys(_AROUND, trial.media(USER, places)) if lists else None
    return Forms(strings=all_kinds if strings else none, lists=all_kinds if lists else none, media=media)


@dataclass
class _Trial:
    render: Render
    as_string: bool
    """Whether the content of the messages around the one on trial is a string."""
    takes_tools: bool
    calls: Message = field(default_factory=dict)
    """The fields of a message with a call; empty if the template shows none."""

    def forms(self, places: Places) -> Forms:
        as_text = self._find_calls()
        strings = frozenset(kind for kind in _AROUND if self.shows_string(kind))
        lists = frozenset(kind for kind in _AROUND if self.shows_list(kind))
        unseen = _AROUND.keys() - strings - lists
        return Forms(
            strings=strings,
            lists=lists,
            lost=frozenset(kind for kind in unseen if self._text(self._with_content(kind, self._content(_WORD)))),
            media={kind: self.media(kind, places) for kind in lists},
            leading_systems=self.shows(SYSTEM, SYSTEM, USER),
            later_systems=self.shows(SYSTEM, USER, ASSISTANT, SYSTEM, USER) and self.shows(SYSTEM, USER, SYSTEM),
            users=self.shows(USER, USER),
            assistants=self.shows(USER, ASSISTANT, ASSISTANT, USER),
            shows_calls=bool(self.calls) or (self.takes_tools and TOOL in strings | lists),
            calls_after_text=self.shows(USER, ASSISTANT, CALLS, TOOL, ASSISTANT, USER),
            several_calls=self._shows_several_calls(),
            arguments_as_text=as_text,
            only_objects=self._raises_for(arguments="lorem"),
            empty_content=self.calls.get("content", ""),
            short_ids=self._raises_for(call_id=_LONG_ID),
            shows_reasoning=self._shows_reasoning(),
        )

    def shows(self, *kinds: str) -> bool:
        """Return whether the template shows all contents of a conversation."""
        messages = self._conversation(kinds)
        text = self._text(messages)
        return text is not None and all(_word(n) in text for n, kind in enumerate(kinds) if kind != CALLS)

    def shows_string(self, kind: str) -> bool:
        text = self._text(self._with_content(kind, _WORD))
        return text is not None and _WORD in text and self._has_calls(kind, text)

    def shows_list(self, kind: str) -> bool:
        """Return whether the template shows all texts of a list, in order, and doesn't print the list."""
        text = self._text(self._with_content(kind, _parts(_WORD, _MORE)))
        if text is None or not 0 <= text.find(_WORD) < text.find(_MORE) or not self._has_calls(kind, text):
            return False
        plain = self._text(self._with_content(kind, _WORD)) or ""
        return all(text.count(key) <= plain.count(key) for key in ("'type'", '"type"', "'text'", '"text"'))

    def media(self, kind: str, places: Places) -> frozenset[str]:
        """Return the modalities whose parts the template has a place for."""
        return frozenset(
            modality
            for modality, (part, place) in places.items()
            if place in (self._text(self._with_content(kind, [part, *_parts(_WORD)])) or "")
        )

    def _has_calls(self, kind: str, text: str) -> bool:
        """Return whether a text has the call of a message that should have one."""
        return kind != CALLS or not self.calls or _NAMES[0] in text

    def _text(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.render(messages)
        except InvalidRequest:
            return None

    def _content(self, word: str) -> str | list[Message]:
        return word if self.as_string else _parts(word)

    def _conversation(self, kinds: Sequence[str]) -> list[Message]:
        messages = []
        for n, kind in enumerate(kinds):
            message: Message = {"role": ASSISTANT if kind == CALLS else kind, "content": self._content(_word(n))}
            more = {CALLS: self.calls or {"content": ""}, TOOL: {"tool_call_id": _IDS[0]}}
            messages.append(message | more.get(kind, {}))
        return messages

    def _with_content(self, kind: str, content: str | list[Message]) -> list[Message]:
        kinds, place = _AROUND[kind]
        messages = self._conversation(kinds)
        messages[place]["content"] = content
        return messages

    def _with_calls(self, *calls: Message) -> list[Message]:
        """Return a conversation with these calls and a result of each."""
        user, asked = self._conversation((USER, CALLS))
        results = [
            self._conversation([USER] * (2 + n) + [TOOL])[-1] | {"tool_call_id": one["id"]}
            for n, one in enumerate(calls)
        ]
        return [user, asked | {"tool_calls": list(calls)}, *results]

    def _find_calls(self) -> bool:
        """Find how the template shows calls; return whether it takes their arguments as text."""
        ((key, value),) = _ARGUMENTS.items()
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            for content in ("", None):
                calls = [_call(_IDS[0], _NAMES[0], arguments)]
                self.calls = {"content": content, "tool_calls": calls}
                text = self._text(self._with_calls(*calls)) or ""
                wanted = [arguments] if isinstance(arguments, str) else [key, value]
                if all(word in text for word in (_NAMES[0], *wanted)) and f"'{key}'" not in text:
                    return isinstance(arguments, str)
        self.calls = {}
        return False

    def _shows_several_calls(self) -> bool:
        if not self.calls:
            return True
        (first,) = self.calls["tool_calls"]
        text = self._text(self._with_calls(first, _call(_IDS[1], _NAMES[1], first["function"]["arguments"])))
        return text is None or _NAMES[1] in text

    def _raises_for(self, call_id: str = _IDS[0], arguments: Any = None) -> bool:
        """Return whether the template shows calls, but raises an error for one with this id or these arguments."""
        if not self.calls:
            return False
        own = self.calls["tool_calls"][0]["function"]["arguments"]
        return self._text(self._with_calls(_call(call_id, _NAMES[0], own if arguments is None else arguments))) is None

    def _shows_reasoning(self) -> bool:
        last = {"role": ASSISTANT, "content": "", "reasoning_content": _WORD, "reasoning": _WORD}
        return _WORD in (self._text([*self._conversation((USER,)), last]) or "")


def _call(call_id: str, name: str, arguments: Any) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(*words: str) -> list[Message]:
    return [{"type": "text", "text": word} for word in words]


def _word(number: int) -> str:
    return f"lorem{number}xq"
