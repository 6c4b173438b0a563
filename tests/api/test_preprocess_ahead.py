"""How far preprocessing runs ahead of the encoder."""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.support.serving import Served, image, image_part, wait_for
from triptych.encode.batching import PREPROCESS_AHEAD
from triptych.encode.loop import EncodeLoop


def test_queued_images_are_not_preprocessed_too_early(service: Served) -> None:
    """While the encoder is blocked, few images are preprocessed; later all requests are answered."""
    (host,) = [
        host for instance in service.running.instances for host in instance.loops if isinstance(host, EncodeLoop)
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
        # each image that was started at the same time may exceed the limit by less than itself
        assert state.queued_patches <= PREPROCESS_AHEAD * (state.max_batch_patches + one)
        service.encoder.opened.set()
        assert {request.result().status_code for request in asked} == {200}
