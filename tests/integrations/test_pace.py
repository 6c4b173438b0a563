"""Rests between the steps of an engine whose requests wait."""

import threading

from triptych_vllm.pace import SHORTEST, Pace


class News(threading.Event):
    """Takes no time to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def test_rests_grow_up_to_a_length_and_begin_short() -> None:
    news = News()
    pace = Pace(news, 0.1)
    for _ in range(12):
        pace.step(is_empty=True)
    assert news.waits[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert news.waits[-1] == 0.1
    pace.step(is_empty=False)
    pace.step(is_empty=True)
    assert news.waits[-1] == SHORTEST


def test_after_news_rests_are_short_again() -> None:
    news = News()
    pace = Pace(news, 0.1)
    for _ in range(12):
        pace.step(is_empty=True)
    news.set()
    pace.step(is_empty=True)
    assert not news.is_set()
    pace.step(is_empty=True)
    assert news.waits[-1] == SHORTEST


def test_an_engine_that_others_wait_for_never_rests() -> None:
    news = News()
    pace = Pace(news, 0.0)
    for _ in range(3):
        pace.step(is_empty=True)
    assert news.waits == [0.0, 0.0, 0.0]
