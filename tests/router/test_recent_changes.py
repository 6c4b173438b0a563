"""Which requests have changed lately."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.router.recent_changes import RecentChanges
from triptych.types import RequestId


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 30), st.integers(1, 6))
def test_those_since_a_number_are_told_or_that_some_are_forgotten(noted: list[int], number: int, size: int) -> None:
    changes = RecentChanges(size)
    for request in noted:
        changes.note(RequestId(str(request)))
    assert changes.number == len(noted)
    later = list(dict.fromkeys(str(request) for request in reversed(noted[number:])))
    found = changes.since(number)
    if found is None:
        assert len(set(noted)) > size, "none had to be forgotten"
        assert len(later) > size
    else:
        assert found == later
