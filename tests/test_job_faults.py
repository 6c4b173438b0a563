"""Whose fault a failure is, and what a row of them means: without device and socket."""

import pytest

from triptych import exit_codes
from triptych.errors import (
    ChildFailed,
    DecodeFailed,
    HelperFailed,
    InstanceBroken,
    InternalError,
    NonFiniteLogits,
    NoTokenAllowed,
    PlanMismatch,
    TriptychError,
)
from triptych.job_faults import MAX_IN_A_ROW, Culprit, FailureRow, culprit_of


@pytest.mark.parametrize(
    ("error", "culprit", "ends_request"),
    [
        (NoTokenAllowed("none"), Culprit.REQUEST, True),
        (NonFiniteLogits("overflow"), Culprit.REQUEST, True),
        (InternalError("typed"), Culprit.REQUEST, True),
        (DecodeFailed("crashed"), Culprit.ITEM, True),
        (PlanMismatch("rows"), Culprit.ITEM, True),
        (HelperFailed("no worker"), Culprit.HELPER, False),
        (RuntimeError("CUDA error"), Culprit.UNCLEAR, False),
        (MemoryError(), Culprit.UNCLEAR, False),
        (InstanceBroken("no answer"), Culprit.DEVICE, False),
        (ChildFailed("rank 1 ended"), Culprit.DEVICE, False),
    ],
)
def test_an_error_says_whose_fault_it_is(error: BaseException, culprit: Culprit, ends_request: bool) -> None:
    assert (culprit_of(error), culprit_of(error).ends_request) == (culprit, ends_request)


def fails(row: FailureRow, *works: str, error: BaseException | None = None) -> None:
    for work in works:
        row.failed(error or RuntimeError("a bug"), work)


def test_unlike_jobs_that_fail_in_a_row_end_the_instance() -> None:
    row = FailureRow()
    fails(row, *"ab")
    with pytest.raises(InstanceBroken, match=r"3 unlike jobs.*a bug") as ended:
        fails(row, "c")
    assert ended.value.exit_code == exit_codes.BROKEN
    assert ended.value.exit_code not in exit_codes.PERMANENT, "starting again may help"


def test_a_request_that_fails_again_and_again_proves_nothing() -> None:
    row = FailureRow()
    fails(row, *"abababab")


def test_a_success_in_between_ends_the_row() -> None:
    row = FailureRow()
    for work in "abcdef":
        fails(row, work)
        row.succeeded()
    fails(row, *"gh")


@pytest.mark.parametrize("error", [DecodeFailed("crashed"), NoTokenAllowed("none")])
def test_what_is_plainly_the_requests_fault_does_not_count(error: TriptychError) -> None:
    """However many come, also after failures that count."""
    row = FailureRow()
    fails(row, *"ab")
    fails(row, *"cdefgh", error=error)


def test_a_helper_counts_each_time_whatever_it_was_to_do() -> None:
    row = FailureRow()
    fails(row, *"aa", error=HelperFailed("no worker"))
    with pytest.raises(InstanceBroken) as ended:
        fails(row, "a", error=HelperFailed("no worker"))
    assert not ended.value.suspect, "no request has caused that"


def test_failures_of_both_kinds_add_up() -> None:
    row = FailureRow()
    fails(row, *"ab"[: MAX_IN_A_ROW - 1])
    with pytest.raises(InstanceBroken) as ended:
        fails(row, "a", error=HelperFailed("no worker"))
    assert ended.value.suspect
