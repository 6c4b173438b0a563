"""Gives the messages of a request the form that the chat template takes, without losing any of their texts."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from blake3 import blake3

from triptych.errors import InvalidRequest
from triptych.prompt.formats.reasoning import THINK
from triptych.prompt.template import REASONING_FIELDS
from triptych.prompt.template_forms import ASSISTANT, CALLS, SYSTEM, TOOL, USER, Forms

Message = Mapping[str, Any]
"""A message: ``role``, and ``content``, which is a string or a list of parts. Further keys go to the template.

A text part is ``{"type": "text", "text": str}``. Other parts are media, and have a modality as their type. The
arguments of a call are JSON, or None.
"""

_BETWEEN = "\n\n"
"""Stands between the texts of messages that are joined."""
_SHORT_ID = 9
_ARGUMENTS = "arguments"
"""The name that arguments get which are no object, where a template shows nothing but objects."""
_SEARCH_SECONDS = 0.2
"""The message that a template can't render is searched for if rendering took no longer."""


@dataclass
class Fitted:
    """A message as the template takes it."""

    message: dict[str, Any]
    number: int
    """Its place in the request; the last one's, of several that were joined."""
    was_system: bool = False
    """Whether it is a system message in the place of a user's."""

    @property
    def kind(self) -> str:
        return CALLS if self.message.get("tool_calls") else str(self.message["role"])


class Fitter:
    """Fits conversations to one template. ``texts`` stand for media, by modality, in a content that is a string;
    ``write`` returns the text of calls, each a name and its arguments, for a template that shows none."""

    def __init__(
        self, forms: Forms, texts: Mapping[str, str], write: Callable[[Sequence[tuple[str, Any]]], str]
    ) -> None:
        self._forms = forms
        self._texts = texts
        self._write = write

    def fit(self, messages: Sequence[Message], *, continues: bool = False) -> list[Fitted]:
        """Return the messages in the template's form. ``continues``: the last one is to be continued.

        Raises InvalidRequest, naming the message, for one that the template would omit."""
        fitted = [Fitted(dict(message), number) for number, message in enumerate(messages)]
        self._place_systems(fitted)
        names: dict[str, str] = {}
        for one in fitted:
            self._fit_calls(one, names)
            one.message["content"] = self._content(one.kind, one.message.get("content"))
        fitted = self._in_turns(self._joined([part for one in self._one_by_one(fitted) for part in self._split(one)]))
        if not self._forms.without_system and fitted[0].kind != SYSTEM:
            fitted.insert(0, self._empty(SYSTEM, 0))
        if continues:
            self._fit_reasoning(fitted[-1].message)
        return fitted

    def _place_systems(self, fitted: Sequence[Fitted]) -> None:
        """Make users' messages of those of the system that the template doesn't take where they are."""
        forms, leading = self._forms, True
        takes = self._takes(SYSTEM) and (forms.always_system or fitted[-1].kind in (SYSTEM, USER))
        for one in fitted:
            leading = leading and one.kind == SYSTEM
            if one.kind == SYSTEM and not (takes and (leading or forms.later_systems)):
                one.message["role"], one.was_system = USER, True

    def _takes(self, kind: str) -> bool:
        return kind in self._forms.strings or kind in self._forms.lists

    def _fit_calls(self, one: Fitted, names: dict[str, str]) -> None:
        """Fit the calls of a message, and a result to its call. ``names`` are the functions' names by the calls' ids;
        those of this message are added."""
        forms, message, where = self._forms, one.message, f"messages[{one.number}]"
        if calls := message.get("tool_calls"):
            names.update((call["id"], call["function"]["name"]) for call in calls)
            if not forms.shows_calls and self._takes(TOOL):
                self._write_calls(message)
            elif not forms.shows_calls or (len(calls) > 1 and not (forms.several_calls or forms.calls_in_turn)):
                which = "more than one call of a message" if forms.shows_calls else "tool calls"
                param = f"{where}.tool_calls"
                raise InvalidRequest(f"{param}: the model's chat template doesn't show {which}", param)
            else:
                message["tool_calls"] = [self._call(call) for call in calls]
        elif (call_id := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = self._id(call_id)
            if call_id in names:
                message.setdefault("name", names[call_id])
            elif not forms.lone_results and self._takes(TOOL):
                raise InvalidRequest(f"{where}: the model's chat template doesn't show results without a call", where)

    def _write_calls(self, message: dict[str, Any]) -> None:
        """Make text of a message's calls."""
        functions = [call["function"] for call in message.pop("tool_calls")]
        text = self._write([(one["name"], _parsed(one["arguments"])) for one in functions])
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [*content, {"type": "text", "text": f"\n{text}"}]
        else:
            message["content"] = f"{content}\n{text}" if content else text

    def _call(self, call: Message) -> dict[str, Any]:
        function = call["function"]
        arguments = _parsed(function["arguments"])
        if self._forms.arguments_as_text:
            arguments = "{}" if arguments == {} else function["arguments"]
        elif self._forms.only_objects and not isinstance(arguments, dict):
            arguments = {_ARGUMENTS: arguments}
        return {**call, "id": self._id(call["id"]), "function": {**function, "arguments": arguments}}

    def _id(self, call_id: str) -> str:
        is_short = len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()
        return call_id if is_short or not self._forms.short_ids else blake3(call_id.encode()).hexdigest()[:_SHORT_ID]

    def _content(self, kind: str, content: str | Sequence[Message] | None) -> Any:
        """Return a content as the template takes it for messages of the kind."""
        forms = self._forms
        strings = kind in forms.strings or kind not in forms.lists
        if kind == CALLS and not content:
            return forms.empty_content
        if not content or not isinstance(content, list):
            text = content or forms.empty_text
            return text if strings else [{"type": "text", "text": text}]
        if kind in forms.lists and (not strings or self._places(kind, content)):
            return [part if part["type"] == "text" else place_of(part["type"]) for part in content]
        return "\n".join(part["text"] if part["type"] == "text" else self._texts[part["type"]] for part in content)

    def _places(self, kind: str, content: Sequence[Message]) -> bool:
        """Return whether the template has a place for all media of a list. Of a user's, a modality without a place is
        one that the model doesn't take."""
        modalities = {str(part["type"]) for part in content} - {"text"}
        return kind == USER or self._forms.media is None or modalities <= self._forms.media[kind]

    def _one_by_one(self, fitted: Sequence[Fitted]) -> Iterator[Fitted]:
        """Yield the messages, each with one call if the template takes no more. A call is then right before its result;
        results stay in order, since media have the order of the request."""
        asked = Fitted({}, 0)
        waiting: dict[str, list[Message]] = {}
        for one in fitted:
            if one.kind == TOOL:
                ready = waiting.get(one.message.get("tool_call_id", ""), [])[:1]
            else:
                ready = list(chain.from_iterable(waiting.values()))
            for call in ready:
                waiting[call["id"]].remove(call)
                yield Fitted({**asked.message, "tool_calls": [call]}, asked.number)
                asked = self._calls_alone(asked)
            calls = one.message.get("tool_calls", ())
            if len(calls) > 1 and not self._forms.several_calls:
                asked, waiting = one, {}
                for call in calls:
                    waiting.setdefault(call["id"], []).append(call)
            else:
                yield one
        for call in chain.from_iterable(waiting.values()):
            yield Fitted({**asked.message, "tool_calls": [call]}, asked.number)
            asked = self._calls_alone(asked)

    def _split(self, one: Fitted) -> Iterator[Fitted]:
        """Yield the message or, if the template would omit its text beside calls, one for each."""
        takes = one.kind not in self._forms.lost and (one.kind != CALLS or self._takes(CALLS))
        if takes or not one.message["content"]:
            yield one
        elif one.kind == CALLS and self._forms.calls_after_text:
            text = {name: value for name, value in one.message.items() if name != "tool_calls"}
            yield Fitted(text | {"content": self._content(ASSISTANT, one.message["content"])}, one.number)
            yield self._calls_alone(one)
        else:
            param = f"messages[{one.number}]" + (".content" if one.kind == CALLS else "")
            what = "text beside tool calls" if one.kind == CALLS else f"messages of the role {one.message['role']!r}"
            raise InvalidRequest(f"{param}: the model's chat template doesn't show {what}", param)

    def _calls_alone(self, one: Fitted) -> Fitted:
        message = {name: value for name, value in one.message.items() if name not in REASONING_FIELDS}
        return Fitted(message | {"content": self._forms.empty_content}, one.number)

    def _joined(self, fitted: Sequence[Fitted]) -> list[Fitted]:
        result: list[Fitted] = []
        for one in fitted:
            if result and self._must_join(last := result[-1], one):
                message = _join(last.message, one.message)
                result[-1] = Fitted(message, one.number, last.was_system and one.was_system)
            else:
                result.append(one)
        return result

    def _must_join(self, first: Fitted, second: Fitted) -> bool:
        match first.kind, second.kind:
            case "system", "system":
                return not self._forms.leading_systems
            case "user", "user":
                return first.was_system or not self._forms.users
            case "assistant", "assistant":
                return not self._forms.assistants
            case "assistant", "calls":
                return not self._forms.assistants and not self._forms.calls_after_text
        return False

    def _in_turns(self, fitted: Sequence[Fitted]) -> list[Fitted]:
        """Return the messages with empty turns where the template demands one."""
        forms, turns = self._forms, self._forms.turns
        result: list[Fitted] = []
        before = None if forms.assistant_first else ASSISTANT
        if not forms.without_user and all(one.kind != USER for one in fitted):
            place = sum(1 for _ in takewhile(lambda one: one.kind == SYSTEM, fitted))
            fitted = [*fitted[:place], self._empty(USER, fitted[-1].number), *fitted[place:]]
        for one in fitted:
            turn = turns.get(one.kind)
            if turn and turn == before:
                before = USER if turn == ASSISTANT else ASSISTANT
                result.append(self._empty(before, one.number))
            before = turn or before
            result.append(one)
        return result

    def _empty(self, role: str, number: int) -> Fitted:
        return Fitted({"role": role, "content": self._content(role, "")}, number)

    def _fit_reasoning(self, message: dict[str, Any]) -> None:
        """Give reasoning that is to be continued as the template shows it: in a field of its own, or as text."""
        content = message["content"]
        thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
        if _is_blank(content) and thought and not self._forms.shows_reasoning:
            for name in REASONING_FIELDS:
                message.pop(name, None)
            message["content"] = self._content(ASSISTANT, f"{THINK.open}\n{thought}")
        elif isinstance(content, str) and self._forms.shows_reasoning:
            before, tag, thought = content.partition(THINK.open)
            if tag and not before.strip() and THINK.close not in thought and thought.strip():
                message |= {"content": "", **dict.fromkeys(REASONING_FIELDS, thought)}


def name_message(
    error: InvalidRequest, fitted: Sequence[Fitted], render: Callable[[Sequence[Message]], object]
) -> InvalidRequest:
    """Return the error that a template raises for messages, with the first one that it raises it for."""

    def fails(messages: Sequence[Message]) -> bool:
        try:
            render(messages)
        except InvalidRequest as other:
            return str(other) == str(error)
        return False

    began = time.thread_time()
    messages = [one.message for one in fitted]
    if not messages or fails([{"role": "user", "content": "x"}]) or time.thread_time() - began > _SEARCH_SECONDS:
        return error
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(messages[:middle]) else (middle, bad)
    param = f"messages[{fitted[bad - 1].number}]"
    return InvalidRequest(f"{param}: {error}", param)


def place_of(modality: str) -> dict[str, Any]:
    """Return a media part without its data. Some templates look for its type, others for a key of this name."""
    return {"type": modality, modality: ""}


def _join(first: Message, second: Message) -> dict[str, Any]:
    """Return one message with the contents and reasoning of both."""
    contents = [content for one in (first, second) if not _is_blank(content := one["content"])]
    if len(contents) < 2:
        joined: Any = contents[0] if contents else second["content"]
    elif all(isinstance(content, str) for content in contents):
        joined = _BETWEEN.join(contents)
    else:
        before, after = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
        joined = [*before, {"type": "text", "text": _BETWEEN}, *after]
    reasoning = {
        name: _BETWEEN.join(thoughts)
        for name in REASONING_FIELDS
        if (thoughts := [one[name] for one in (first, second) if one.get(name)])
    }
    return {**first, **second, **reasoning, "content": joined}


def _is_blank(content: Any) -> bool:
    texts = [content] if isinstance(content, str) else [part.get("text", part["type"]) for part in content or []]
    return not any(text.strip() for text in texts)


def _parsed(arguments: str | None) -> Any:
    """Return a call's arguments as what the JSON has, or as text if it isn't JSON; none are an empty object."""
    if arguments is None or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value
