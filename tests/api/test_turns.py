"""Long videos share an encoder in time slices: with each other, with other clients' videos and with images."""

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import video_part
from tests.support.clips import clip
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.encode import preprocessing
from triptych.encode.batching import MAX_LONG_ITEMS
from triptych.encode.jobs import EncodeJob
from triptych.encode.loop import EncodeLoop
from triptych.models.base import EncoderInput
from triptych.router.encode_dispatcher import LONG_ITEMS_PER_CLIENT

TIME_SLICE_SECONDS = 0.05


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short slices, so that a video takes several even on a fast machine."""
    monkeypatch.setattr(preprocessing, "TIME_SLICE_SECONDS", TIME_SLICE_SECONDS)


def long_videos(number: int) -> list[bytes]:
    """Return different files of the same frames, most of whose decoded frames are not sampled."""
    video = clip("mp4", frames=240, width=960, height=544, rate=10)
    return [video + struct.pack(">I4sI", 12, b"free", one) for one in range(number)]


class Turns:
    """Log of what an encoder preprocesses."""

    def __init__(self, service: Served) -> None:
        hosts = [host for instance in service.running.instances for host in instance.loops]
        (self.host,) = [host for host in hosts if isinstance(host, EncodeLoop)]
        self.log: list[tuple[str, bool, float]] = []
        """Each finished slice: the item's key, whether it is long, and the seconds."""
        self._next_parts = self.host.preprocessing.run_slice
        self.host.preprocessing.run_slice = self._noted  # type: ignore[method-assign]

    def _noted(self, job: EncodeJob) -> list[EncoderInput]:
        began = time.monotonic()
        parts = self._next_parts(job)
        self.log.append((job.key, job.long, time.monotonic() - began))
        return parts

    def of_others(self) -> int:
        """Return how many slices of long items ended before the first other item started."""
        return next(number for number, (_, long, _) in enumerate(self.log) if not long)


def test_an_image_waits_for_at_most_one_time_slice_of_long_videos(folder: Path) -> None:
    with served(folder) as service, ThreadPoolExecutor(8) as pool:
        turns = Turns(service)
        videos = [pool.submit(service.post, [video_part(data), text_part("x")]) for data in long_videos(5)]
        wait_for(lambda: len(turns.host.debug_state().jobs) >= LONG_ITEMS_PER_CLIENT and len(turns.log) > 3)
        asked = turns.host.num_requested
        picture = pool.submit(service.post, [image_part(image(seed=77)), text_part("x")])
        wait_for(lambda: turns.host.num_requested > asked)
        before = len(turns.log)
        assert picture.result(30).status_code == 200
        assert not any(video.done() for video in videos[2:]), "nor did it wait for a video's end"
        assert turns.of_others() <= before + 2, "the running slice, and one that started before the loop was notified"
        started = {key for key, _, _ in turns.log}
        assert len(started) > 2, "videos share the encoder with each other, too"
        assert [video.result(60).status_code for video in videos] == [200] * 5
        assert max(len(turns.log), 1) > 10


@pytest.mark.slow
def test_long_videos_of_different_clients_share_the_encoder(folder: Path) -> None:
    with served(folder) as service, ThreadPoolExecutor(8) as pool:
        turns = Turns(service)
        *crowd, single = long_videos(MAX_LONG_ITEMS + 2)

        def ask(data: bytes, key: str) -> int:
            body: dict[str, Any] = service.body([video_part(data), text_part("x")])
            with service.client() as client:
                return client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"}).status_code

        service.encoder.close()
        answers = [pool.submit(ask, data, "one") for data in crowd]
        wait_for(lambda: service.running.frontend.router.num_requests == len(crowd))
        wait_for(lambda: len(turns.host.debug_state().jobs) == LONG_ITEMS_PER_CLIENT)
        (one,) = {job.client for job in turns.host.debug_state().jobs}
        answers.append(pool.submit(ask, single, "another"))
        wait_for(lambda: len(turns.host.debug_state().jobs) == LONG_ITEMS_PER_CLIENT + 1)
        (other,) = [job for job in turns.host.debug_state().jobs if job.client != one]
        wait_for(lambda: any(key == other.key for key, _, _ in turns.log))
        service.encoder.opened.set()
        assert [answer.result(60) for answer in answers] == [200] * len(answers)


@pytest.mark.slow
def test_time_slices_of_long_items_are_short(folder: Path) -> None:
    with served(folder) as service:
        turns = Turns(service)
        (data,) = long_videos(1)
        assert service.post([video_part(data), text_part("x")]).status_code == 200
        seconds = sorted(took for _, long, took in turns.log if long)
        # the median: the first one also reads the file, and the machine may be busy
        assert len(seconds) > 1
        assert seconds[len(seconds) // 2] < 4 * TIME_SLICE_SECONDS
