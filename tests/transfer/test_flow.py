from triptych.transfer.flow import WINDOW, GrantCap


def test_without_history_the_cap_is_the_pool() -> None:
    assert GrantCap(16).blocks() == 16


def test_common_sizes_fit_and_rare_large_ones_do_not() -> None:
    cap = GrantCap(1000)
    for _ in range(19):
        cap.record(4)
    cap.record(500)
    assert cap.blocks() == 4


def test_large_sizes_that_are_common_fit() -> None:
    cap = GrantCap(1000)
    for _ in range(8):
        cap.record(4)
    for _ in range(2):
        cap.record(500)
    assert cap.blocks() == 500


def test_only_recent_sizes_count() -> None:
    cap = GrantCap(1000)
    for size in [500] * WINDOW + [4] * WINDOW:
        cap.record(size)
    assert cap.blocks() == 4


def test_the_cap_is_within_the_pool() -> None:
    cap = GrantCap(3)
    cap.record(500)
    assert cap.blocks() == 3
    cap = GrantCap(3)
    cap.record(0)
    assert cap.blocks() == 1
