"""Files of media go to an encode instance only if it lacks the rows, and in pieces."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.serving import Served, image, image_part, served, text_part, wait_for
from tests.support.stage_loops import encode_loops
from triptych.messages.work import MEDIA_PIECE_BYTES


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two encode instances."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    with served(folder, "2E1PD") as service:
        yield service


def fetched(service: Served) -> int:
    return sum(loop.fetcher.num_bytes for loop in encode_loops(service.running))


def test_the_second_use_of_a_picture_sends_no_bytes(service: Served) -> None:
    picture = image(96, 64, 1901)
    before = fetched(service)
    requested = sum(loop.num_requested for loop in encode_loops(service.running))
    service.text([text_part("one"), image_part(picture)])
    assert fetched(service) - before == len(picture)
    service.text([text_part("two"), image_part(picture)])  # no prefix that the KV cache has
    assert sum(loop.num_requested for loop in encode_loops(service.running)) - requested == 2
    assert fetched(service) - before == len(picture)
    wait_for(service.everything_is_back)


def test_requests_that_share_a_picture_fetch_it_once(service: Served) -> None:
    picture = image(96, 64, 1902)
    before = fetched(service)
    service.preprocessor.close()
    with ThreadPoolExecutor(4) as clients:
        contents = [[text_part(f"{number}"), image_part(picture)] for number in range(4)]
        asked = [clients.submit(service.post, content) for content in contents]
        (loop,) = encode_loops(service.running)
        wait_for(lambda: [len(job.transfers) for job in loop.debug_state().jobs] == [4])
        service.preprocessor.opened.set()
        assert {request.result().status_code for request in asked} == {200}
    assert fetched(service) - before == len(picture)


def test_a_file_of_many_pieces_gives_the_same_answer(service: Served) -> None:
    picture = image(96, 64, 1903)
    large = picture + bytes(12 * MEDIA_PIECE_BYTES + 1)  # decoders stop at the end of the picture
    before = fetched(service)
    expected = service.text([image_part(picture)])
    assert service.text([image_part(large)]) == expected
    assert fetched(service) - before == len(picture) + len(large)


def test_a_drain_gives_items_that_have_not_begun_to_another_instance(pair: Served) -> None:
    leaving, staying = encode_loops(pair.running)
    pair.preprocessor.close()
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(pair.post, [image_part(image(96, 64, 1910 + number))]) for number in range(8)]
        wait_for(lambda: sum(len(loop.debug_state().jobs) for loop in (leaving, staying)) == 8)
        before = len(leaving.debug_state().jobs)
        assert before > 1
        next(one for one in pair.running.instances if leaving in one.loops).drain()
        wait_for(lambda: sum(len(loop.debug_state().jobs) for loop in (leaving, staying)) == 8)
        wait_for(lambda: len(leaving.debug_state().jobs) < before)
        pair.preprocessor.opened.set()
        assert {request.result().status_code for request in asked} == {200}
    wait_for(lambda: pair.everything_is_back() and leaving.idle)
