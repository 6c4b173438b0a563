"""Requests with a LoRA."""

import msgspec
import pytest

from tests.support.engine_instances import generate
from triptych.engine.prefix import extend_page_hashes
from triptych.engine.request import Request, make_request
from triptych.errors import InvalidRequest

LORAS = ["seen", "heard"]


def made(lora: str) -> Request:
    message = msgspec.structs.replace(generate("r"), lora=lora)
    return make_request(message, [], 64, 264, loras=LORAS)


def test_requests_have_the_number_of_their_own() -> None:
    assert [made(name).lora for name in ("", "seen", "heard")] == [None, 0, 1]
    with pytest.raises(InvalidRequest, match="no LoRA 'other'"):
        made("other")


def test_requests_of_different_ones_share_no_pages() -> None:
    hashes = []
    for name in ("", "seen", "heard", "seen"):
        request = made(name)
        extend_page_hashes(request, 4, 2, "layout")
        hashes.append(tuple(request.page_hashes))
    assert len(set(hashes)) == 3
    assert hashes[1] == hashes[3]
