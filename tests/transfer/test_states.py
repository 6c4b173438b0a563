import itertools

import pytest

from triptych.errors import TransferError
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import TransferId

B, W, T, S, F = TransferState
ALLOWED = {(B, W), (W, T), (T, W), (T, S), (B, F), (W, F), (T, F), (W, B), (T, B)}
WAYS = {B: [], W: [W], T: [W, T], S: [W, T, S], F: [F]}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(TransferState, repeat=2)))
def test_only_the_documented_transitions_are_possible(old: TransferState, new: TransferState) -> None:
    progress = Progress(TransferId("t"), 0.0)
    for state in WAYS[old]:
        progress.enter(state, 0.0)
    if old is new or (old, new) in ALLOWED:
        progress.enter(new, 1.0)
        assert progress.state is new
    else:
        with pytest.raises(TransferError, match=f"from {old.value} to {new.value}"):
            progress.enter(new, 1.0)
        assert progress.state is old


def test_every_state_but_success_has_a_deadline() -> None:
    deadlines = Deadlines(bootstrapping=1, waiting_for_input=2, transferring=3, failed=4)
    for state, limit in [(B, 1), (W, 2), (T, 3), (F, 4)]:
        progress = Progress(TransferId("t"), 10.0)
        for step in WAYS[state]:
            progress.enter(step, 10.0)
        assert not progress.overdue(10.0 + limit, deadlines)
        assert progress.overdue(10.1 + limit, deadlines)
        progress.touch(12.0)
        assert not progress.overdue(12.0 + limit, deadlines)
    assert deadlines.of(S) == float("inf")
