"""Messages in the channels of gpt-oss (harmony): reasoning in ``analysis``, calls and text before them in
``commentary``, the answer in ``final``::

<|channel|>analysis<|message|>It's about Rome.<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

import re
from collections.abc import Callable

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ignore, read_value
from triptych.prompt.formats.reader import NotACallError, Reader, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_ENDS = (END, CALL, RETURN, START, CHANNEL)


class Harmony(Format):
    """A header may name the recipient before or after the channel. Prompts end with ``<|start|>assistant``, so answers
    may begin with the recipient."""

    families = "gpt-oss"
    parsers = ("openai",)
    openers = (START, CHANNEL, MESSAGE)
    first_openers = ("to=",)
    closers = (CONSTRAIN, END, CALL, RETURN)
    always = True
    text_begin = f"{CHANNEL}final{MESSAGE}"
    form = CallForm(
        CHANNEL,
        f"commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}{{arguments}}",
        f"{END}{START}assistant{CHANNEL}",
        only_opener=False,
        plain=f"{text_begin}{{text}}",
        preamble=f"{CHANNEL}commentary{MESSAGE}{{text}}{END}{START}assistant",
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        while opener in (START, CHANNEL, MESSAGE, *self.first_openers):
            header = opener
            while opener not in (MESSAGE, END, ""):
                text, opener = yield from reader.until(START, CHANNEL, CONSTRAIN, MESSAGE, END)
                header += text + opener
            if not (opener or header.startswith((START, CHANNEL))):
                raise NotACallError
            reader.decide()
            out.end_reasoning()
            if opener == MESSAGE:
                opener = yield from self._message(reader, out, header)
            reader.keep()

    def _message(self, reader: Reader, out: Output, header: str) -> Steps[str]:
        """Read a message's text, and return the marker that ends it."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and (recipient[2] in out.tools or recipient[1]):
            out.any_name = True
            out.begin(recipient[2])
            if (yield from read_value(reader, out.argue)):
                out.end()
            return (yield from _text(reader, ignore))
        if channel and channel[1] == "analysis":
            out.begin_reasoning()
            end = yield from _text(reader, out.reason)
            out.end_reasoning()
            return end
        return (yield from _text(reader, out.say))


def _text(reader: Reader, emit: Callable[[str], object]) -> Steps[str]:
    """Pass on a message's text, without markers that belong to headers."""
    while (end := (yield from reader.stream((*_ENDS, CONSTRAIN, MESSAGE), emit))) in (CONSTRAIN, MESSAGE):
        pass
    return end
