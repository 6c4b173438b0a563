"""Requests whose length decides on their rotary frequencies (LongRoPE, dynamic scaling)."""

import numpy as np
import pytest

from triptych.api.generation import default_room
from triptych.engine.prefix import extend_page_hashes
from triptych.engine.request import Request, make_request
from triptych.layers.rope_config import LENGTH_AXIS, LengthRule
from triptych.messages.work import Generate, SamplingParams
from triptych.types import Address, RequestId

SHORT = 8
LONGROPE, DYNAMIC = LengthRule(SHORT, each=False), LengthRule(SHORT, each=True)


def made(num_prompt: int, max_tokens: int, rule: LengthRule | None) -> Request:
    generate = Generate(
        request=RequestId("r"),
        tokens=list(range(num_prompt)),
        positions=np.broadcast_to(np.arange(num_prompt, dtype="<f8"), (3, num_prompt)).tobytes(),
        next_position=num_prompt,
        items=[],
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=[],
        reply_to=Address(""),
    )
    return make_request(generate, [], 64, 64, rule)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "longrope", "dynamic"),
    [(5, 4, 0, 0), (5, 5, 9, 9), (8, 1, 0, 0), (9, 1, 9, 9), (9, 7, 9, 15)],
)
def test_all_tokens_of_a_request_have_one_length(num_prompt: int, max_tokens: int, longrope: int, dynamic: int) -> None:
    """That of its longest answer, less the last token, which isn't computed."""
    for rule, expected in ((LONGROPE, longrope), (DYNAMIC, dynamic)):
        found = made(num_prompt, max_tokens, rule)
        assert found.rope_length == expected
        positions = found.positions_of(2, num_prompt + max_tokens - 2)
        assert positions[LENGTH_AXIS] == [float(expected)] * (num_prompt + max_tokens - 2)
        assert positions[0] == positions[2] == list(range(2, num_prompt + max_tokens))
        assert found.positions_of(num_prompt, 1)[LENGTH_AXIS] == [float(expected)]


def test_axes_are_left_where_the_length_does_not_matter() -> None:
    found = made(5, 4, None)
    assert found.rope_length is None
    assert found.positions_of(3, 4) == [[3, 4, 5, 6]] * 3


@pytest.mark.parametrize("rule", [LONGROPE, DYNAMIC])
def test_requests_with_other_frequencies_share_no_pages(rule: LengthRule) -> None:
    hashes = []
    for max_tokens in (1, 4, 5, 6):
        one = made(5, max_tokens, rule)
        extend_page_hashes(one, 4, 1, "layout")
        hashes.append(one.page_hashes)
    assert hashes[0] == hashes[1] != hashes[2]
    assert (hashes[2] == hashes[3]) == (rule is LONGROPE)
    assert hashes[3] != hashes[0]


def test_an_answer_of_unknown_length_keeps_a_short_prompt_short() -> None:
    assert default_room(60, 4, 0, None) == 60
    assert default_room(60, 4, 0, SHORT) == 5
    assert default_room(2, 4, 0, SHORT) == 2, "the context may end before"
    assert default_room(56, 8, 0, SHORT) == 1
    assert default_room(55, 9, 0, SHORT) == 55, "a long request anyway"
    assert default_room(60, 4, 6, SHORT) == 60, "it was asked for"
