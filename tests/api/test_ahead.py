"""How far preprocessing runs ahead of the tower."""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.support.serving import Served, image, image_part, wait_for
from triptych.encode.loop import PREPROCESS_AHEAD, EncodeLoop


def test_images_wait_as_files_not_as_patches(service: Served) -> None:
    """Requests, with the tower held up: few images are preprocessed, and all are answered in the end."""
    (host,) = [
        host for instance in service.running.instances for host in instance.hosts if isinstance(host, EncodeLoop)
    ]
    service.encoder.close()
    with ThreadPoolExecutor(32) as clients:
        asked = [clients.submit(service.post, [image_part(image(400, 320, 500 + number))]) for number in range(32)]

        def is_full() -> bool:
            state = host.debug_state()
            return bool(state.encoding and state.queued_patches and not state.num_preprocessing)

        wait_for(is_full)
        time.sleep(0.2)
        state = host.debug_state()
        one = max(part.patches for part in state.parts)
        # each of those that were begun at once may go beyond by less than one image
        assert state.queued_patches <= PREPROCESS_AHEAD * (state.max_batch_patches + one)
        service.encoder.opened.set()
        assert {request.result().status_code for request in asked} == {200}
