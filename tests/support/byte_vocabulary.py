"""A vocabulary of bytes, for grammars."""


class ByteVocabulary:
    """A token for each byte, then the special ones and the end."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"\xff" + one.encode() for one in (*special, "<end>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
