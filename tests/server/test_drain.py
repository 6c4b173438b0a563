"""When a drain is over."""

from triptych.server.drain import QUIET_SECONDS, Drain


def test_it_is_over_after_a_quiet_moment() -> None:
    drain = Drain(100.0, 30.0)
    assert not drain.is_over(100.0, idle=True), "work may be on its way"
    assert not drain.is_over(100.1, idle=False)
    assert not drain.is_over(100.2, idle=True)
    assert not drain.is_over(100.2 + 0.9 * QUIET_SECONDS, idle=True)
    assert drain.is_over(100.3 + QUIET_SECONDS, idle=True)


def test_it_does_not_wait_for_ever() -> None:
    drain = Drain(100.0, 30.0)
    assert not drain.is_over(129.9, idle=False)
    assert drain.is_over(130.0, idle=False)
