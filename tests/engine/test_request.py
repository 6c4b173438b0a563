import numpy as np
import pytest

from triptych.engine.request import Request
from triptych.messages.work import SamplingParams
from triptych.types import RequestId


def request(**sampling: object) -> Request:
    return Request(
        id=RequestId("r"),
        tokens=[10, 11, 12],
        positions=np.array([[0, 1, 1], [0, 1, 2], [0, 1, 3]]),
        next_position=4,
        items=[],
        sampling=SamplingParams(**({"max_tokens": 3} | sampling)),
        eos_token_ids=frozenset({99}),
    )


def test_positions_continue_beyond_the_prompt() -> None:
    one = request()
    whole = np.array([[0, 1, 1, 4, 5, 6], [0, 1, 2, 4, 5, 6], [0, 1, 3, 4, 5, 6]])
    for start in range(6):
        for count in range(1, 7 - start):
            np.testing.assert_array_equal(one.positions_of(start, count), whole[:, start : start + count])


def test_positions_may_be_fractional() -> None:
    one = request()
    one.next_position = 8.75
    np.testing.assert_array_equal(one.positions_of(2, 3), [[1, 8.75, 9.75], [2, 8.75, 9.75], [3, 8.75, 9.75]])


@pytest.mark.parametrize(
    ("sampling", "generated", "reason"),
    [
        ({}, [1], None),
        ({}, [1, 2, 3], "length"),
        ({}, [99], "stop"),
        ({}, [1, 2, 99], "stop"),
        ({"ignore_eos": True}, [99], None),
        ({"ignore_eos": True}, [1, 2, 99], "length"),
        ({"stop_token_ids": [5]}, [5], "stop"),
        ({"stop_token_ids": [99], "ignore_eos": True}, [99], "stop"),
    ],
)
def test_finish_reason(sampling: dict[str, object], generated: list[int], reason: str | None) -> None:
    one = request(**sampling)
    one.tokens += generated
    assert one.finish_reason() == reason


def test_decoding_means_that_only_the_newest_token_is_left() -> None:
    one = request()
    one.num_computed = 2
    assert not one.decoding  # the prompt's last token is not decoding
    one.num_computed = 3
    one.tokens.append(1)
    assert not one.decoding  # it has no pages
    one.running = True
    assert one.decoding
    one.num_computed = 0  # preempted
    assert not one.decoding
    assert (one.num_generated, one.max_length) == (1, 6)
