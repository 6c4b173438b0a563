"""Incremental detokenization: final text only, and no text that may become part of a stop string."""

from collections.abc import Collection, Sequence
from copy import deepcopy

from triptych.errors import InvalidRequest
from triptych.prompt.tokenizer import Tokenizer
from triptych.text.partial_match import partial_match_length


class Detokenizer:
    """Detokenizes one answer. The results of ``push`` and ``finish``, joined, are the tokenizer's own decoding of all
    tokens up to the first stop string, however the tokens were split into pushes. No result is changed by a later
    token.

    The first stop string is the one that is complete first; of two complete at once, the longer one. ``stopped`` is
    True once one was found; it isn't part of the text. As in vLLM, a stop string counts only if it ends after the first
    ``min_tokens`` tokens. Raises InvalidRequest for an empty stop string.

    ``keep_special`` are the special tokens that are part of the text although ``skip_special_tokens`` is True.
    ``preceding`` are tokens whose text the answer continues, with those of its spaces that begin no text. A character
    that they begin and the answer ends belongs to the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        *,
        keep_special: Collection[int] = (),
        preceding: Sequence[int] = (),
    ) -> None:
        if not all(stop):
            raise InvalidRequest("a stop string can't be empty", "stop")
        self.stopped = False
        self.stop_string: str | None = None
        """The first stop string, once it was found."""
        self._hidden = tokenizer.special_ids.difference(keep_special) if skip_special_tokens else frozenset()
        self._decoder = tokenizer.text_decoder(preceding)
        self._stop = tuple(stop)
        self._unsearched_tokens = min_tokens
        """Number of next tokens that can't complete a stop string."""
        self._unsearched = 0
        """Number of next characters that can't: text of those tokens that was still held back after the last one."""
        self._held = ""
        """Text that may be the start of a stop string."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain; empty once stopped."""
        text = ""
        for token_id in token_ids:
            if not self.stopped and token_id not in self._hidden and (new := self._decoder.push(token_id)):
                text += self._release(new)
            if self._unsearched_tokens:
                self._unsearched_tokens -= 1
                self._unsearched = 0 if self._unsearched_tokens else len(deepcopy(self._decoder).pause())
        return text

    def finish(self) -> str:
        """Return the text that was held back. Bytes of an incomplete character become U+FFFD."""
        text = self._release(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        """Add text to what is held back, and return what can't be part of a stop string."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        unsearched = len(text) if self._unsearched_tokens else min(self._unsearched, len(text))
        self._unsearched -= min(self._unsearched, unsearched)
        unsearched += len(self._held)
        text = self._held + text
        # one that ends within the unsearched text was complete before ``min_tokens``, or was searched for before
        starts = [(stop, text.find(stop, max(0, unsearched - len(stop) + 1))) for stop in self._stop]
        if ends := [(start + len(stop), start) for stop, start in starts if start >= 0]:
            end, start = min(ends)
            self.stopped, self.stop_string = True, text[start:end]
            self._held = ""
            return text[:start]
        length = partial_match_length(text, self._stop)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]
