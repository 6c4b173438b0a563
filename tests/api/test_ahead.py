"""How far preprocessing runs ahead of the tower."""

from concurrent.futures import ThreadPoolExecutor

from tests.api.serving import Served, image, image_part, wait_for
from triptych.roles.encode import AHEAD, EncodeHost


def test_images_wait_as_files_not_as_patches(service: Served) -> None:
    """Requests, with the tower held up: few images are preprocessed, and all are answered in the end."""
    (host,) = [
        host for instance in service.running.instances for host in instance.hosts if isinstance(host, EncodeHost)
    ]
    service.encoder.close()
    with ThreadPoolExecutor(32) as clients:
        asked = [clients.submit(service.post, [image_part(image(400, 320, 500 + number))]) for number in range(32)]
        wait_for(lambda: len(host._jobs) == 32)
        wait_for(lambda: not host._preprocessing)
        patches = [job.patches for job in host._queue]
        assert sum(patches) <= AHEAD * host._queue.max_patches + patches[0]
        assert len(host._waiting) >= 8
        service.encoder.opened.set()
        assert {request.result().status_code for request in asked} == {200}
