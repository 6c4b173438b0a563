"""Finds out by trial what a chat template takes: it renders conversations with words of its own and looks for them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
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
_TURNS_ON_TRIAL = (
    (USER, CALLS, TOOL, USER),
    (USER, CALLS, TOOL, ASSISTANT, USER),
    (USER, ASSISTANT, CALLS, TOOL, USER),
    (USER, ASSISTANT, CALLS, TOOL, ASSISTANT, USER),
)
"""Conversations that tell whose turns calls and results are: which of them a template shows differs for each answer."""
_IDS, _LONG_ID, _TINY_ID = ("q1w2e3r4t", "z9x8c7v6b"), "call_q1w2e3r4t5y6u7i8", "q"
_NAMES = ("veniam_xq", "aliquip_xq")
_ARGUMENTS = {"nostrud_xq": "ullamco_xq"}
PROBE_TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "lorem_tool",
            "description": "Lorem.",
            "parameters": {"type": "object", "properties": {"lorem": {"type": "string", "description": "Lorem."}}},
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
    always_system: bool = True
    """Whether it shows a system message if the last message isn't the user's, too."""
    later_systems: bool = True
    """Whether a system message may follow others."""
    users: bool = True
    """Whether a user's message may follow another."""
    assistants: bool = True
    """Whether an assistant's message may follow another."""
    turns: Mapping[str, str] = field(default_factory=dict)
    """Whose turn a kind of message is, USER's or ASSISTANT's, if turns must alternate and may be empty. Kinds that
    aren't here don't count."""
    assistant_first: bool = True
    """Whether the assistant's turn may be the first."""
    empty_text: str = ""
    """What a content without text must be."""
    without_user: bool = True
    """Whether a conversation may lack messages of the user."""
    without_system: bool = True
    """Whether a conversation may begin without a system message."""
    lone_results: bool = True
    """Whether it shows a result without a call."""
    shows_calls: bool = True
    """Whether it shows calls."""
    calls_after_text: bool = False
    """Whether a message with calls may follow one of the assistant with text."""
    several_calls: bool = True
    """Whether it shows all calls of a message, and their results."""
    calls_in_turn: bool = True
    """Whether a call may follow the result of another."""
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


def find_forms(render: Render, places: Places) -> Forms:
    """Return what a template takes. ``render`` renders a conversation with it, and raises InvalidRequest if the
    template does."""
    trial = _Trial(render)
    strings, lists = trial.shows_string(USER), trial.shows_list(USER)
    if not strings and not lists:
        return _forms_behind_system(render, places)
    trial.strings = frozenset(_AROUND) if strings else frozenset()
    if trial.shows_in_a_form(ASSISTANT):
        trial.shows_in_a_form(SYSTEM)
        return trial.forms(places)
    # it shows the last message alone, or wants more than messages
    all_kinds, none = frozenset(_AROUND), frozenset[str]()
    media = dict.fromkeys(_AROUND, trial.media(USER, places)) if lists else None
    return Forms(strings=all_kinds if strings else none, lists=all_kinds if lists else none, media=media)


def _forms_behind_system(render: Render, places: Places) -> Forms:
    """Return what a template takes that shows no conversation without a system message, or can't be judged."""
    for content in ("", _parts("")):
        system: Message = {"role": SYSTEM, "content": content}

        def render_behind(messages: Sequence[Message], system: Message = system) -> str:
            return render(messages if messages and messages[0]["role"] == SYSTEM else [system, *messages])

        trial = _Trial(render_behind)
        if trial.shows_string(USER) or trial.shows_list(USER):
            return replace(find_forms(render_behind, places), without_system=False)
    return Forms()


@dataclass
class _Trial:
    render: Render
    strings: frozenset[str] = frozenset(_AROUND)
    """Kinds of messages whose content is a string where another one is on trial."""
    calls: Message = field(default_factory=dict)
    """The fields of a message with a call; empty if the template shows none."""

    def forms(self, places: Places) -> Forms:
        as_text = self._find_calls()
        strings = frozenset(kind for kind in _AROUND if self.shows_string(kind))
        lists = frozenset(kind for kind in _AROUND if self.shows_list(kind))
        unseen = _AROUND.keys() - strings - lists
        users, assistants = self.shows(USER, USER), self.shows(USER, ASSISTANT, ASSISTANT, USER)
        empty_text = self._find_empty_text()
        turns = {} if users or assistants or empty_text is None else self._find_turns()
        return Forms(
            strings=strings,
            lists=lists,
            lost=frozenset(kind for kind in unseen if self._text(self._with_content(kind, self._content(kind, _WORD)))),
            media={kind: self.media(kind, places) for kind in lists},
            leading_systems=self.shows(SYSTEM, SYSTEM, USER),
            always_system=all(self.shows(SYSTEM, *kinds) or not self.shows(*kinds) for kinds in self._other_ends()),
            later_systems=self.shows(SYSTEM, USER, ASSISTANT, SYSTEM, USER) and self.shows(SYSTEM, USER, SYSTEM),
            users=users,
            assistants=assistants,
            turns=turns,
            empty_text=empty_text or "",
            assistant_first=self.shows(ASSISTANT, USER),
            without_user=self.shows(SYSTEM) and self.shows(SYSTEM, ASSISTANT),
            lone_results=self.shows(USER, TOOL),
            shows_calls=bool(self.calls),
            calls_after_text=bool(turns) or self.shows(USER, ASSISTANT, CALLS, TOOL, ASSISTANT, USER),
            several_calls=self._shows_several_calls(),
            calls_in_turn=self.shows(USER, CALLS, TOOL, CALLS, TOOL),
            arguments_as_text=as_text,
            only_objects=not self._shows_call(arguments=_WORD),
            empty_content=self.calls.get("content", ""),
            short_ids=not all(self._shows_call(call_id=one) for one in (_LONG_ID, _TINY_ID)),
            shows_reasoning=self._shows_reasoning(),
        )

    def _other_ends(self) -> list[tuple[str, ...]]:
        """Return conversations that don't end with the user."""
        return [(USER, ASSISTANT), *([(USER, CALLS, TOOL)] if self.calls else [])]

    def shows(self, *kinds: str) -> bool:
        """Return whether the template shows all contents of a conversation."""
        messages = self._conversation(kinds)
        text = self._text(messages)
        return text is not None and all(_word(n) in text for n, kind in enumerate(kinds) if kind != CALLS)

    def shows_in_a_form(self, kind: str) -> bool:
        """Return whether the template shows messages of a kind in the form of users' messages, or in the other one,
        which they then have."""
        kinds, _ = _AROUND[kind]
        own = self.strings
        for self.strings in (own, own ^ ({ASSISTANT, CALLS} if kind == ASSISTANT else {kind})):
            if self.shows(*kinds):
                return True
        self.strings = own
        return False

    def shows_string(self, kind: str) -> bool:
        text = self._text(self._with_content(kind, _WORD))
        if text is None or _WORD not in text or not self._has_calls(kind, text):
            return False
        # some take a text beside calls for reasoning, which is left out once the answer is there
        later = self._text(self._with_content(kind, _WORD, ASSISTANT, USER)) if kind == CALLS else None
        return later is None or _WORD in later

    def shows_list(self, kind: str) -> bool:
        """Return whether the template shows all texts of a list, in order, and doesn't print the list."""
        text = self._text(self._with_content(kind, _parts(_WORD, _MORE)))
        if text is None or not 0 <= text.find(_WORD) < text.find(_MORE) or not self._has_calls(kind, text):
            return False
        if kind == CALLS and _WORD not in (
            self._text(self._with_content(kind, _parts(_WORD), ASSISTANT, USER)) or _WORD
        ):
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

    def _content(self, kind: str, word: str) -> str | list[Message]:
        return word if kind in self.strings else _parts(word)

    def _conversation(self, kinds: Sequence[str]) -> list[Message]:
        messages = []
        # as in requests, only results of calls have names
        result = {"tool_call_id": _IDS[0]} | ({"name": _NAMES[0]} if CALLS in kinds else {})
        for n, kind in enumerate(kinds):
            message: Message = {"role": ASSISTANT if kind == CALLS else kind, "content": self._content(kind, _word(n))}
            more = {CALLS: self.calls, TOOL: result}
            messages.append(message | more.get(kind, {}))
        return messages

    def _with_content(self, kind: str, content: str | list[Message], *later: str) -> list[Message]:
        """Return the plain conversation with such a message, and messages of the kinds ``later`` behind it."""
        kinds, place = _AROUND[kind]
        messages = self._conversation((*kinds, *later))
        messages[place]["content"] = content
        return messages

    def _with_calls(self, *calls: Message) -> list[Message]:
        """Return a conversation with these calls and a result of each."""
        user, asked = self._conversation((USER, CALLS))
        results = [
            self._conversation([USER] * (2 + n) + [TOOL])[-1]
            | {"tool_call_id": one["id"], "name": one["function"]["name"]}
            for n, one in enumerate(calls)
        ]
        return [user, asked | {"tool_calls": list(calls)}, *results]

    def _find_calls(self) -> bool:
        """Find how the template shows calls; return whether it takes their arguments as text."""
        ((key, value),) = _ARGUMENTS.items()
        own = self.strings
        for strings, arguments, content in product(
            (own, own ^ {TOOL}), (_ARGUMENTS, json.dumps(_ARGUMENTS)), ("", None)
        ):
            calls = [_call(_IDS[0], _NAMES[0], arguments)]
            self.strings, self.calls = strings, {"content": content, "tool_calls": calls}
            text = self._text(self._with_calls(*calls)) or ""
            wanted = [arguments] if isinstance(arguments, str) else [key, value]
            if all(word in text for word in (_NAMES[0], *wanted)) and f"'{key}'" not in text:
                self.shows_in_a_form(TOOL)
                return isinstance(arguments, str)
        self.strings, self.calls = own, {}
        self.shows_in_a_form(TOOL)
        return False

    def _shows_several_calls(self) -> bool:
        if not self.calls:
            return True
        (first,) = self.calls["tool_calls"]
        text = self._text(self._with_calls(first, _call(_IDS[1], _NAMES[1], first["function"]["arguments"])))
        return text is not None and all(word in text for word in (*_NAMES, _word(2), _word(3)))

    def _shows_call(self, call_id: str = _IDS[0], arguments: str = "") -> bool:
        """Return whether the template shows a call with this id and these arguments, if it shows calls at all."""
        if not self.calls:
            return True
        own = self.calls["tool_calls"][0]["function"]["arguments"]
        text = self._text(self._with_calls(_call(call_id, _NAMES[0], arguments or own)))
        return text is not None and arguments in text

    def _find_empty_text(self) -> str | None:
        """Return ``Forms.empty_text``; None if no content may be without text."""
        for text in ("", " "):
            messages = self._conversation((USER, ASSISTANT, USER, ASSISTANT, USER))
            for message in messages[1:3]:
                message["content"] = self._content(message["role"], text)
            if self._text(messages) is not None:
                return text
        return None

    def _find_turns(self) -> dict[str, str]:
        """Return ``Forms.turns`` of a template whose turns must alternate."""
        shown = [self.shows(*kinds) for kinds in _TURNS_ON_TRIAL]
        for more in ({CALLS: ASSISTANT, TOOL: USER}, {}, {CALLS: ASSISTANT}, {TOOL: USER}):
            turns = {USER: USER, ASSISTANT: ASSISTANT, **more}
            if shown == [_alternate([turns[kind] for kind in kinds if kind in turns]) for kinds in _TURNS_ON_TRIAL]:
                return turns
        return {USER: USER, ASSISTANT: ASSISTANT, CALLS: ASSISTANT, TOOL: USER}

    def _shows_reasoning(self) -> bool:
        last = {"role": ASSISTANT, "content": "", "reasoning_content": _WORD, "reasoning": _WORD}
        return _WORD in (self._text([*self._conversation((USER,)), last]) or "")


def _alternate(turns: Sequence[str]) -> bool:
    return all(first != second for first, second in pairwise(turns))


def _call(call_id: str, name: str, arguments: Any) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(*words: str) -> list[Message]:
    return [{"type": "text", "text": word} for word in words]


def _word(number: int) -> str:
    return f"lorem{number}xq"
