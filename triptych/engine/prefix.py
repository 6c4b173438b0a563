"""Hashes of full KV pages: pages with equal hashes hold equal keys and values.

The keys and values of a token depend on all tokens up to it, including the content of media. Positions follow from
these, and from the length of the request, where ropes depend on that. So a page's hash covers the previous page's
hash, the page's tokens, and which rows of which item its media tokens stand for. The first hash covers the layout of
the KV cache, and with it the model and the dtypes: no two models share a page. It covers the length that ropes need,
the LoRA, and the salt as well: clients with different salts share no pages, and so cannot infer each other's prompts
from response times.
"""

from array import array

import msgspec
from blake3 import blake3

from triptych.engine.request import Request


def extend_page_hashes(request: Request, page_size: int, num_pages: int, layout: str) -> None:
    """Extend ``request.page_hashes`` to ``num_pages`` pages, all of which must be full of tokens. ``layout`` is the
    digest of the KV cache's layout."""
    hashes = request.page_hashes
    while len(hashes) < num_pages:
        start = len(hashes) * page_size
        digest = blake3(hashes[-1] if hashes else _seed(request, layout))
        digest.update(array("q", request.tokens[start : start + page_size]).tobytes())
        for item in request.items:
            for token, row, length in item.placement.runs(start, start + page_size):
                digest.update(f"|{item.key}|{token - start}|{row}|{length}".encode())
        hashes.append(digest.digest())


def _seed(request: Request, layout: str) -> bytes:
    """Return what the first page's hash covers besides its tokens."""
    return msgspec.msgpack.encode((layout, request.cache_salt, request.rope_length, request.lora))
