"""Long videos take turns on an encoder: with each other, with other clients' and with pictures."""

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from tests.api.test_videos import video_part
from tests.media.clips import clip
from triptych.encode import loop as encode
from triptych.encode.jobs import EncodeJob
from triptych.encode.loop import LONG_ITEMS_AT_A_TIME, EncodeLoop
from triptych.models.base import EncoderInput
from triptych.router.encode_dispatcher import LONG_ITEMS_PER_CLIENT

TURN_SECONDS = 0.05


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a video takes several on a fast machine, too."""
    monkeypatch.setattr(encode, "TURN_SECONDS", TURN_SECONDS)


def long_videos(number: int) -> list[bytes]:
    """Files that differ, of the same frames: with many pixels to decode for a few that are seen."""
    video = clip("mp4", frames=240, width=960, height=544, rate=10)
    return [video + struct.pack(">I4sI", 12, b"free", one) for one in range(number)]


class Turns:
    """What an encoder preprocesses, as it happens."""

    def __init__(self, service: Served) -> None:
        hosts = [host for instance in service.running.instances for host in instance.loops]
        (self.host,) = [host for host in hosts if isinstance(host, EncodeLoop)]
        self.log: list[tuple[str, bool, float]] = []
        """Of each turn that is over whose item it was, whether that is long, and how many seconds it took."""
        self._next_parts = self.host._next_parts
        self.host._next_parts = self._noted  # type: ignore[method-assign]

    def _noted(self, job: EncodeJob) -> list[EncoderInput]:
        began = time.monotonic()
        parts = self._next_parts(job)
        self.log.append((job.key, job.long, time.monotonic() - began))
        return parts

    def of_others(self) -> int:
        """How many long items' turns were over when the first other item's began."""
        return next(number for number, (_, long, _) in enumerate(self.log) if not long)


def test_a_picture_beside_five_long_videos_waits_for_one_turn_at_most(folder: Path) -> None:
    with served(folder) as service, ThreadPoolExecutor(8) as pool:
        turns = Turns(service)
        videos = [pool.submit(service.post, [video_part(data), text_part("x")]) for data in long_videos(5)]
        wait_for(lambda: len(turns.host._jobs) >= LONG_ITEMS_PER_CLIENT and len(turns.log) > 3)
        asked = turns.host.num_asked
        picture = pool.submit(service.post, [image_part(image(seed=77)), text_part("x")])
        wait_for(lambda: turns.host.num_asked > asked)
        before = len(turns.log)
        assert picture.result(30).status_code == 200
        assert not any(video.done() for video in videos[2:]), "nor did it wait for a video's end"
        assert turns.of_others() <= before + 2, "the turn that ran, and one that had begun while the loop was told"
        begun = {key for key, _, _ in turns.log}
        assert len(begun) > 2, "videos take turns with each other, too"
        assert [video.result(60).status_code for video in videos] == [200] * 5
        assert max(len(turns.log), 1) > 10


def test_anothers_long_video_does_not_wait_for_the_end_of_one_callers(folder: Path) -> None:
    with served(folder) as service, ThreadPoolExecutor(8) as pool:
        turns = Turns(service)
        *crowd, single = long_videos(LONG_ITEMS_AT_A_TIME + 2)

        def ask(data: bytes, key: str) -> int:
            body: dict[str, Any] = service.body([video_part(data), text_part("x")])
            with service.client() as client:
                return client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"}).status_code

        service.encoder.close()
        answers = [pool.submit(ask, data, "one") for data in crowd]
        wait_for(lambda: service.running.frontend.router.num_requests == len(crowd))
        wait_for(lambda: len(turns.host._jobs) == LONG_ITEMS_PER_CLIENT)
        (one,) = {job.client for job in turns.host._jobs.values()}
        answers.append(pool.submit(ask, single, "another"))
        wait_for(lambda: len(turns.host._jobs) == LONG_ITEMS_PER_CLIENT + 1)
        (other,) = [job for job in turns.host._jobs.values() if job.client != one]
        wait_for(lambda: any(key == other.key for key, _, _ in turns.log))
        service.encoder.opened.set()
        assert [answer.result(60) for answer in answers] == [200] * len(answers)


def test_a_long_items_turn_is_short(folder: Path) -> None:
    with served(folder) as service:
        turns = Turns(service)
        (data,) = long_videos(1)
        assert service.post([video_part(data), text_part("x")]).status_code == 200
        seconds = sorted(took for _, long, took in turns.log if long)
        # the median: the first one also reads the file, and the machine may be busy
        assert len(seconds) > 1
        assert seconds[len(seconds) // 2] < 4 * TURN_SECONDS
