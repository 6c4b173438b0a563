"""Text that comes in pieces, searched for marks that may be split between them."""

from collections.abc import Sequence


def partial_match_length(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of the marks without being all of it."""
    longest = max(map(len, marks), default=1)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
