"""Partial matches at the end of streamed text: a tag or stop string may be split between pieces."""

from collections.abc import Sequence


def partial_match_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of one of the marks."""
    longest = max(map(len, marks), default=1)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
