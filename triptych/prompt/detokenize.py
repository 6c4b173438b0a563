"""Incremental detokenization: whole characters only, and no text that may become part of a stop string.

``tokenizers.decoders.DecodeStream`` isn't used: it can't flush the bytes that it holds back at the end of a stream. So
its text may differ from that of a full decode.
"""

from collections.abc import Collection, Sequence
from functools import partial

from triptych.errors import InvalidRequest
from triptych.prompt.partial_match import partial_match_length
from triptych.prompt.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A window that won't end in whole characters (a stream of bytes that isn't UTF-8) is cut beyond this many tokens, to
# keep the work per token constant.
_MAX_WINDOW = 16


class Detokenizer:
    """Detokenizes one answer. The results of ``push`` and ``finish``, joined, are the decoded tokens up to the first
    stop string, however the tokens were split into pushes. Exact for byte-level tokenizers.

    The first stop string is the one that is complete first; of two complete at once, the longer one. ``stopped`` is
    True once one was found; it isn't part of the text. As in vLLM, a stop string counts only if it ends after the first
    ``min_tokens`` tokens. Raises InvalidRequest for an empty stop string.

    ``keep_special`` are the special tokens that are part of the text although ``skip_special_tokens`` is True.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        keep_special: Collection[int] = (),
    ) -> None:
        if not all(stop):
            raise InvalidRequest("a stop string can't be empty", "stop")
        self.stopped = False
        self._hidden = tokenizer.special_ids.difference(keep_special) if skip_special_tokens else frozenset()
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._stop = tuple(stop)
        self._unsearched = min_tokens
        """Number of next tokens that can't complete a stop string."""
        # Text of the window is that of context and window less that of the context: decoders that treat the first
        # token of a text differently must not see the window as one.
        self._context: list[int] = []
        self._context_length = 0
        self._window: list[int] = []
        self._emitted = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain; empty once stopped."""
        text = ""
        for token_id in token_ids:
            new = self._decode_next(token_id)
            text += self._release(new, search=not self._unsearched)
            self._unsearched = max(0, self._unsearched - 1)
        return text

    def finish(self) -> str:
        """Return the text that was held back. Bytes of an incomplete character become U+FFFD."""
        text = self._release(self._window_text()[self._emitted :], search=not self._unsearched)
        self._window.clear()
        self._emitted = 0
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode_next(self, token_id: int) -> str:
        if self.stopped or token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._window_text()
        if text.endswith(REPLACEMENT):
            # Only the last replacement can still become another character.
            new = text[self._emitted : -1]
            self._emitted = max(self._emitted, len(text) - 1)
            if len(self._window) > _MAX_WINDOW:
                self._cut_window(text)
            return new
        new = text[self._emitted :]
        if text or not self._context:
            self._begin_window(len(self._window))
        else:
            # Special tokens only. They'd be a context without text.
            self._window.clear()
        return new

    def _window_text(self) -> str:
        return self._decode(self._context + self._window)[self._context_length :]

    def _begin_window(self, cut: int) -> None:
        """Make the window's first ``cut`` tokens the context of the others."""
        self._context = self._window[:cut]
        self._context_length = len(self._decode(self._context))
        self._window = self._window[cut:]
        self._emitted = 0

    def _cut_window(self, text: str) -> None:
        """Drop tokens whose text can't change any more: cut where both sides' texts, joined, equal the window's.

        A character across the cut would become two or more replacements, so such a cut is never taken.
        """
        for cut in range(len(self._window) - 1, 0, -1):
            head = self._decode(self._context + self._window[:cut])[self._context_length :]
            tail = self._decode(self._window[cut:])
            if head and tail and head + tail == text:
                emitted = self._emitted - len(head)
                self._begin_window(cut)
                self._emitted = emitted
                return

    def _release(self, text: str, *, search: bool) -> str:
        """Add text to what is held back, and return what can't be part of a stop string."""
        if self.stopped:
            return ""
        old = len(self._held)
        text = self._held + text
        ends = []
        if search:
            # one that ends within the held text was complete before ``min_tokens``
            starts = [(stop, text.find(stop, max(0, old - len(stop) + 1))) for stop in self._stop]
            ends = [(start + len(stop), start) for stop, start in starts if start >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        length = partial_match_length(text, self._stop)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]
