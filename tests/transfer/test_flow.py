from triptych.transfer.flow import WINDOW, GrantCap


def test_without_experience_a_transfer_may_have_the_pool() -> None:
    assert GrantCap(16).blocks() == 16


def test_an_ordinary_transfer_passes_whole_and_a_rare_giant_does_not() -> None:
    cap = GrantCap(1000)
    for _ in range(19):
        cap.learn(4)
    cap.learn(500)
    assert cap.blocks() == 4


def test_giants_that_are_common_are_ordinary() -> None:
    cap = GrantCap(1000)
    for _ in range(8):
        cap.learn(4)
    for _ in range(2):
        cap.learn(500)
    assert cap.blocks() == 500


def test_what_is_long_past_does_not_count() -> None:
    cap = GrantCap(1000)
    for size in [500] * WINDOW + [4] * WINDOW:
        cap.learn(size)
    assert cap.blocks() == 4


def test_the_cap_is_within_the_pool() -> None:
    cap = GrantCap(3)
    cap.learn(500)
    assert cap.blocks() == 3
    cap = GrantCap(3)
    cap.learn(0)
    assert cap.blocks() == 1
