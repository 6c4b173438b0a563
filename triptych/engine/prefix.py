"""The names of filled KV pages: equal names, equal keys and values.

What a token's keys and values depend on is every token up to it, the content of the media among them, and their
positions, which follow from these two. So a page's name is a hash over the name of the page before it, its tokens, and
which rows of which item its media tokens stand for. A salt in the first name keeps apart those who shall not learn from
response times what others have asked.
"""

from array import array

from blake3 import blake3

from triptych.engine.request import Request


def extend_page_hashes(request: Request, page_size: int, num_pages: int) -> None:
    """Adds to ``request.page_hashes`` until there are ``num_pages`` (which must be full of tokens)."""
    keys = request.page_hashes
    while len(keys) < num_pages:
        start = len(keys) * page_size
        digest = blake3(keys[-1] if keys else request.cache_salt.encode())
        digest.update(array("q", request.tokens[start : start + page_size]).tobytes())
        for item in request.items:
            for token, row, length in item.placement.runs(start, start + page_size):
                digest.update(f"|{item.key}|{token - start}|{row}|{length}".encode())
        keys.append(digest.digest())
