"""Text beside many requests whose pictures don't come, because the encode instance stands still."""

import signal
import statistics
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Asking, wait_for
from tests.support.commands import stream_of, triptych
from tests.support.scraping import scrape
from tests.support.serving import image, image_part, text_part

PLACES = 2
"""``--max-num-seqs``. Prompts with pictures would fill these many times over."""
FLAGS = ("--port", "0", "--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "4096", "--lease-expiry", "60")
NUM_PICTURES = 30
NUM_TEXTS = 7
NOISE = 0.05
"""Seconds that a shared machine may add to a text's time of some 20 milliseconds. Those that wait do so for seconds."""


class Service:
    def __init__(self, url: str) -> None:
        self.url = url
        self.texts = self.pictures = 0

    def text_seconds(self) -> float:
        """The time to first token of a text, as the median of several: answers have one token."""
        seconds = []
        for _ in range(NUM_TEXTS):
            self.texts += 1
            answer = Asking(self.url, f"Text {self.texts}", max_tokens=1).result()
            assert answer.status == 200, answer
            seconds.append(answer.seconds)
        return statistics.median(seconds)

    def ask(self, picture: int, question: str) -> Asking:
        self.pictures += 1
        return Asking(self.url, [text_part("Look."), image_part(image(128, 96, picture)), text_part(question)])

    def have_come(self) -> bool:
        """Whether the frontend has taken all requests with pictures."""
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            return scrape(client).total("mm_items_total") == self.pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "busy"),
    [
        pytest.param("1E1PD", False, marks=pytest.mark.slow),
        ("1E1P1D", False),
        pytest.param("1E1P3D", False, marks=pytest.mark.slow),
        pytest.param("1E2PD", True, marks=pytest.mark.slow),  # one with a long answer gets no pictures, and no text
    ],
)
def test_texts_do_not_wait_for_requests_that_wait_for_their_pictures(folder: Path, topology: str, busy: bool) -> None:
    with (
        triptych("serve", folder, *FLAGS, "--topology", topology, "--max-num-seqs", str(PLACES)) as command,
        ExitStack() as stack,
    ):
        service = Service(command.wait_until_ready())
        first = service.ask(0, "What is it?")
        assert first.result().status == 200
        if busy:
            stack.enter_context(stream_of(service.url, "tiny", 4000))
        service.text_seconds()
        alone = service.text_seconds()
        encoder = command.child("e0")
        encoder.send_signal(signal.SIGSTOP)
        asked = [service.ask(0, f"And now, question {number}?") for number in range(NUM_PICTURES // 2)]
        asked += [service.ask(1 + number, "What is it?") for number in range(NUM_PICTURES // 2)]
        wait_for(service.have_come, 20)
        beside = service.text_seconds()
        still_waiting = sum(one.under_way for one in asked)
        encoder.send_signal(signal.SIGCONT)
        assert {one.result(60).status for one in asked} == {200}
        print(f"{topology}: text alone {alone:.3f} s, beside {still_waiting} that wait {beside:.3f} s")
        assert still_waiting == NUM_PICTURES
        assert beside <= 1.5 * alone + NOISE
