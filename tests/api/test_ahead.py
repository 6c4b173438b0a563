"""How far preprocessing runs ahead of the tower."""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.api.serving import Served, image, image_part, wait_for
from triptych.encode.loop import PREPROCESS_AHEAD, EncodeLoop


def test_images_wait_as_files_not_as_patches(service: Served) -> None:
    """Requests, with the tower held up: few images are preprocessed, and all are answered in the end."""
    (host,) = [
        host for instance in service.running.instances for host in instance.loops if isinstance(host, EncodeLoop)
    ]
    service.encoder.close()
    with ThreadPoolExecutor(32) as clients:
        asked = [clients.submit(service.post, [image_part(image(400, 320, 500 + number))]) for number in range(32)]
        wait_for(lambda: host._batch is not None and host._queue.num_patches and not host._preprocessing)
        time.sleep(0.2)
        one = max(part.patches for part in host._parts.values())
        # each of those that were begun at once may go beyond by less than one image
        assert host._queue.num_patches <= PREPROCESS_AHEAD * (host._queue.max_patches + one)
        service.encoder.opened.set()
        assert {request.result().status_code for request in asked} == {200}
