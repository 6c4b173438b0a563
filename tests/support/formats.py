"""Formats of answers: found as services find them, and read from pieces."""

import itertools
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.format_cases import SCHEMA, FormatCase
from triptych.prompt.formats.catalog import Formats, find_formats
from triptych.prompt.formats.events import Event, TextDelta, ToolCallArguments, ToolCallStart
from triptych.prompt.formats.parser import AnswerParser
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.template import ChatTemplate

TOOLS: dict[str, Any] = {"weather": SCHEMA, "time": None}


class Vocabulary:
    """What formats are found from of a tokenizer."""

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        self._special = special
        self.special_ids: Collection[int] = range(len(special))

    def token_of(self, token_id: int) -> str:
        return self._special[token_id]


def find(folder: Path, case: FormatCase, **named: str) -> tuple[Formats, ChatTemplate]:
    folder.mkdir()
    (folder / "chat_template.jinja").write_text(case.template)
    template = ChatTemplate(folder)
    return find_formats(template.render, template.source, Vocabulary(case.special), **named), template


def joined(parser: AnswerParser, text: str, cuts: list[int]) -> list[Event]:
    """The events of a text that is cut, those of a kind that follow each other joined."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    events: list[Event] = []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        last = events[-1] if events else None
        if type(event) is type(last) and not isinstance(event, ToolCallStart):
            events[-1] = replace(last, text=last.text + event.text)  # type: ignore[union-attr, arg-type]
        else:
            events.append(event)
    return events


def read(
    formats: Formats, text: str, cuts: list[int], reasoning: Reasoning = Reasoning.POSSIBLE, **more: Any
) -> list[Event]:
    return joined(formats.parser(reasoning, TOOLS, **more), text, cuts)


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    names = [one.name for one in events if isinstance(one, ToolCallStart)]
    texts = [
        "".join(one.text for one in events if isinstance(one, ToolCallArguments) and one.index == index)
        for index in range(len(names))
    ]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def text_of(events: list[Event]) -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta))
