"""The decoders of ``tokenizer.json``, as chains of stages that take one token after the other.

Most decoders look at each token by itself. ``Fuse`` and ``ByteLevel`` join all tokens into one, so decoders behind them
see a single token, which arrives in fragments.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders

from triptych.text import decoder_stages as stages
from triptych.text.decoder_stages import Edit, TextStage, byte_of, spelled_bytes

_JOINING = ("Fuse", "ByteLevel")
_CLEANUP = [
    *((f" {mark}", mark) for mark in ".?!,"),
    *((" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve")),
    (" 're", "'re"),
]
"""What WordPiece and CTC replace in each token, in this order."""


@dataclass(frozen=True)
class Step:
    """One decoder of a chain."""

    stage: Callable[[], TextStage]
    """Makes the stage of a new text."""
    middle: Edit
    """Returns what one token adds within a text. Surrogates stand for bytes that aren't UTF-8."""
    first: Edit
    """The same for the first token of a text."""


class TextDecoder:
    """Decodes the tokens of one text, given one by one. The results of all calls, joined, are the tokenizer's own
    decoding of all tokens; none is changed by a later token."""

    def __init__(self, token_of: Callable[[int], str | None], steps: Sequence[Step]) -> None:
        self._token_of = token_of
        self._stages = [step.stage() for step in steps]

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now final. Ids without text are skipped."""
        token = self._token_of(token_id)
        if token is None:
            return ""
        tokens = [token]
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def pause(self) -> str:
        """Return the text that is held back, but for the start of what later tokens may complete.

        It ends the text of a prompt: what an answer completes belongs to the answer."""
        return self._flush(TextStage.pause.__name__)

    def finish(self) -> str:
        """Return the text that is held back. Bytes of an incomplete character become U+FFFD."""
        return self._flush(TextStage.finish.__name__)

    def _flush(self, method: str) -> str:
        tokens: list[str] = []
        for stage in self._stages:
            tokens = (stage.push(tokens) if tokens else []) + getattr(stage, method)()
        return "".join(tokens)


def steps_of(decoder: decoders.Decoder | None) -> list[Step]:
    """Return the steps of a tokenizer's decoder. Without one, tokens are words with a space between them."""
    if decoder is None:
        return [_indexed(first=lambda token: token, middle=lambda token: " " + token)]
    steps: list[Step] = []
    joined = False
    for state in _flat(json.loads(decoder.__getstate__())):
        kind = state["type"]
        steps += _JOINED[kind](state) if joined else _BY_TOKEN[kind](state)
        joined = joined or kind in _JOINING
    return steps


def strips_ends(decoder: decoders.Decoder | None) -> bool:
    """Return whether a decoder strips the ends of tokens. The tokenizers package panics when one has fewer characters
    than it strips."""
    states = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    return any(state["type"] == "Strip" and state["stop"] for state in states)


def token_bytes(token: str, steps: Sequence[Step], *, first: bool = False) -> bytes:
    """Return the bytes that a token of the vocabulary adds to a text, which need not be whole characters. The ``first``
    token of a text may lack a space that others have."""
    for step in steps:
        token = (step.first if first else step.middle)(token)
    return token.encode(errors="surrogateescape")


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [one for part in state["decoders"] for one in _flat(part)]


# ── decoders that are given tokens ───────────────────────────────────────────────────────────────────────────────────


def _metaspace(state: dict[str, Any]) -> list[Step]:
    first = _replace(state["replacement"], _first_space(state))
    return [_indexed(first=first, middle=_replace(state["replacement"], " "))]


def _word_piece(state: dict[str, Any]) -> list[Step]:
    prefix, clean = state["prefix"], _replace_all(_CLEANUP if state["cleanup"] else [])

    def middle(token: str) -> str:
        return clean(token[len(prefix) :] if token.startswith(prefix) else " " + token)

    return [_indexed(first=clean, middle=middle)]


def _suffix(state: dict[str, Any]) -> list[Step]:
    edit = _replace(state["suffix"], " ")
    return [Step(lambda: stages.Suffixed(state["suffix"]), edit, edit)]


def _ctc(state: dict[str, Any]) -> list[Step]:
    edit = _replace_all(_ctc_pairs(state))
    return [Step(lambda: stages.Collapsed(edit), edit, edit)]


_BY_TOKEN: dict[str, Callable[[dict[str, Any]], list[Step]]] = {
    "Replace": lambda state: [_each(_replace_pattern(state))],
    "Strip": lambda state: [_each(_strip(state["content"], state["start"], state["stop"]))],
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _suffix,
    "CTC": _ctc,
    "ByteFallback": lambda _: [Step(stages.ByteRuns, _byte_text, _byte_text)],
    "ByteLevel": lambda _: [Step(stages.Bytes, _spelled_text, _spelled_text)],
    "Fuse": lambda _: [],
}


# ── decoders that are given one token in fragments, which is the first and the last ──────────────────────────────────


def _joined_replace(state: dict[str, Any]) -> list[Step]:
    if old := state["pattern"].get("String"):
        return [_replaced(old, state["content"])]
    return [_whole(_replace_pattern(state))]


def _joined_strip(state: dict[str, Any]) -> list[Step]:
    content, start, stop = state["content"], state["start"], state["stop"]
    return [Step(lambda: stages.Stripped(content, start, stop), lambda text: text, _strip(content, start, 0))]


def _joined_bytes(_: dict[str, Any]) -> list[Step]:
    def edit(token: str) -> str:
        return (byte_of(token) or token.encode()).decode(errors="replace")

    return [_whole(edit, stages.LENGTH_OF_BYTE)]


_JOINED: dict[str, Callable[[dict[str, Any]], list[Step]]] = {
    "Replace": _joined_replace,
    "Strip": _joined_strip,
    "Metaspace": lambda state: [_replaced(state["replacement"], _first_space(state))],
    "WordPiece": lambda state: [_replaced(*pair) for pair in _CLEANUP if state["cleanup"]],
    "BPEDecoder": lambda state: [_replaced(state["suffix"], "")],
    "CTC": lambda state: [_replaced(*pair) for pair in _ctc_pairs(state)],
    "ByteFallback": _joined_bytes,
    "ByteLevel": lambda _: [_whole(lambda text: spelled_bytes(text).decode(errors="replace"))],
    "Fuse": lambda _: [],
}


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _each(edit: Edit) -> Step:
    return Step(lambda: stages.EachToken(edit), _guarded(edit), _guarded(edit))


def _indexed(*, first: Edit, middle: Edit) -> Step:
    return Step(lambda: stages.FirstAndRest(first, middle), middle, first)


def _replaced(old: str, new: str) -> Step:
    edit = _replace(old, new)
    return Step(lambda: stages.Replaced(old, new), edit, edit) if old else _whole(edit)


def _whole(edit: Edit, longest: int | None = None) -> Step:
    return Step(lambda: stages.Whole(edit, longest), _guarded(edit), _guarded(edit))


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _guarded(edit: Edit) -> Edit:
    """Leave text with surrogates as it is: the tokenizers package refuses it."""

    def guarded(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            return text
        return edit(text)

    return guarded


def _replace(old: str, new: str) -> Edit:
    return lambda text: text.replace(old, new)


def _replace_all(pairs: Sequence[tuple[str, str]]) -> Edit:
    def replace_all(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    return replace_all


def _replace_pattern(state: dict[str, Any]) -> Edit:
    if (old := state["pattern"].get("String")) is not None:
        return _replace(old, state["content"])
    library = decoders.Replace(Regex(state["pattern"]["Regex"]), state["content"])
    return lambda text: str(library.decode([text]))


def _strip(content: str, start: int, stop: int) -> Edit:
    def strip(text: str) -> str:
        text = text[min(start, len(text) - len(text.lstrip(content))) :]
        return text[: len(text) - min(stop, len(text) - len(text.rstrip(content)))]

    return strip


def _first_space(state: dict[str, Any]) -> str:
    """Return what Metaspace makes of its space in the first token."""
    return " " if state["prepend_scheme"] == "never" else ""


def _ctc_pairs(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(state["pad_token"], ""), *([*_CLEANUP, (state["word_delimiter_token"], " ")] if state["cleanup"] else [])]


def _byte_text(token: str) -> str:
    byte = byte_of(token)
    return token if byte is None else byte.decode(errors="surrogateescape")


def _spelled_text(token: str) -> str:
    return spelled_bytes(token).decode(errors="surrogateescape")
