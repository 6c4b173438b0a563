"""Where the tokens of a text begin in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.prompt.tokenizer import Tokenizer
from triptych.text.decoder_stages import incomplete_end


@dataclass(frozen=True)
class TokenPlace:
    """The place of a token in a text."""

    offset: int
    """Where the token's text begins, in characters. A token that continues a character has the character's offset."""
    is_first: bool = False
    """Whether it is the first token of the text."""


class TextOffsets:
    """Decodes a text, or what continues the ``preceding`` tokens, and places each token when it arrives.

    A token has a place before its text is final: the place is that of its bytes."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.text_decoder(preceding)
        self._begins_text = not preceding
        self._pieces: list[str] = []
        self._length = 0
        self._pending = bytearray(incomplete_end(b"".join(map(tokenizer.bytes_of, preceding))))
        """Bytes of tokens whose text isn't final."""
        self._begun = _num_begun(self._pending)
        """Number of characters that those bytes begin."""

    def add(self, token: int) -> TokenPlace:
        """Add a token to the text."""
        first, self._begins_text = self._begins_text, False
        spelled = self._tokenizer.bytes_of(token, first=first)
        offset = self.end.offset - (self._begun > 0 and _continues(spelled[:1]))
        self._pending += spelled
        self._begun += _num_begun(spelled)
        self._release(self._decoder.push(token))
        return TokenPlace(offset, first)

    def pause(self) -> None:
        """Make what is held back final, because other text follows."""
        self._release(self._decoder.pause())

    @property
    def text(self) -> str:
        """The text that is final."""
        return "".join(self._pieces)

    @property
    def end(self) -> TokenPlace:
        """The place of a token without text."""
        return TokenPlace(self._length + self._begun)

    def _release(self, text: str) -> None:
        if not text:
            return
        data = text.encode()
        # decoded otherwise than alone, such as bytes that aren't UTF-8: then the text is all that is known
        self._pending = self._pending[len(data) :] if self._pending.startswith(data) else bytearray()
        self._begun = _num_begun(self._pending)
        self._length += len(text)
        self._pieces.append(text)


def _continues(byte: bytes) -> bool:
    return byte != b"" and byte[0] & 0xC0 == 0x80


def _num_begun(data: bytes | bytearray) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in data)
