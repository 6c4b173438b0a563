"""An overloaded service refuses requests at once, serves the others, and answers correctly."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.harness import FLOAT32
from tests.support.scraping import scrape
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for


def test_a_client_at_its_limit_gets_429_and_others_are_served(folder: Path) -> None:
    with served(folder, topology="1EPD", max_queue_per_client=1) as service, ThreadPoolExecutor(2) as pool:
        service.steps.close()
        first = pool.submit(service.post)
        assert service.steps.entered.wait(10)
        refused = service.post()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        with service.client() as client:
            headers = {"authorization": "Bearer another"}
            other = pool.submit(client.post, CHAT, json=service.body(), headers=headers)
            wait_for(lambda: service.running.frontend.router.num_requests == 2)
            service.steps.opened.set()
            assert (first.result(20).status_code, other.result(20).status_code) == (200, 200)


def test_each_choice_counts_as_a_request_of_its_client(folder: Path) -> None:
    with served(folder, topology="1EPD", max_queue_per_client=3) as service:
        assert service.post(n=3, max_tokens=1).status_code == 200
        refused = service.post(n=4, max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        wait_for(service.everything_is_back)
        assert service.post(n=3, max_tokens=1).status_code == 200


def test_a_full_queue_refuses_requests_at_once(folder: Path) -> None:
    with served(folder, topology="1EPD", max_queue=8) as service, ThreadPoolExecutor(8) as pool:
        service.steps.close()
        waiting = [pool.submit(service.post) for _ in range(8)]
        wait_for(lambda: service.running.frontend.router.num_requests == 8)
        began = time.process_time()
        with service.client() as client:
            for _ in range(20):
                response = client.post(CHAT, json=service.body([image_part(), text_part("?")]))
                assert response.status_code == 503
                assert "retry-after" in response.headers
            assert scrape(client).total("admission_rejections_total", error="Overloaded") == 20
        assert time.process_time() - began < 20 * 0.1
        assert not any(answer.done() for answer in waiting)
        service.steps.opened.set()
        assert {answer.result(20).status_code for answer in waiting} == {200}


def test_texts_are_answered_while_anothers_sixty_images_are_encoded(folder: Path) -> None:
    with served(folder) as service, ThreadPoolExecutor(1) as pool:
        service.encoder.delay = 0.2
        album = [image_part(image(224, 224, seed=5000 + number)) for number in range(60)]  # a few to a batch
        with service.client() as client:
            headers = {"authorization": "Bearer album"}
            body = service.body([*album, text_part("?")])
            pending = pool.submit(client.post, CHAT, json=body, headers=headers, timeout=60)
            assert service.encoder.entered.wait(10)
            for number in range(3):
                assert service.text(f"text {number}")
            picture = service.text([image_part(image(seed=5500)), text_part("?")])
            assert not pending.done(), "the album still takes its time"
            service.encoder.delay = 0.0
            assert pending.result(60).status_code == 200
        assert service.text([image_part(image(seed=5500)), text_part("?")]) == picture


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_simultaneous_image_requests_on_one_encoder_all_get_their_right_answer(folder: Path, count: int) -> None:
    def ask(service: Served, number: int) -> str:
        content = [image_part(image(96, 64, seed=6000 + number)), text_part(f"What is number {number}?")]
        with service.client() as client:
            response = client.post(CHAT, json=service.body(content, temperature=0, max_tokens=4), timeout=120)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    with served(folder) as service:
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda number: ask(service, number), range(count)))
        wait_for(service.everything_is_back)
    with served(folder) as alone:
        assert answers == [ask(alone, number) for number in range(count)]


def test_a_later_request_of_higher_priority_starts_first(folder: Path) -> None:
    """Across clients, with one instance that runs one request and has two more dispatched to it."""
    engine = replace(FLOAT32, max_num_seqs=1)
    order: list[str] = []

    def ask(service: Served, name: str, priority: int, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        body = service.body(name, priority=priority, stream=True)
        with service.client() as client, client.stream("POST", CHAT, json=body, headers=headers) as response:
            for _ in response.iter_lines():
                if name not in order:
                    order.append(name)

    with served(folder, topology="1EPD", engine=engine) as service, ThreadPoolExecutor(7) as pool:
        router = service.running.frontend.router
        service.steps.close()
        asked = []
        wanted = [("first", 9, "a"), ("second", 9, "a"), ("third", 9, "a")]  # at the instance, all of them
        wanted += [("later", 2, "a"), ("latest", 2, "b"), ("plain", 0, "a"), ("urgent", 0, "b")]
        for number, (name, priority, client) in enumerate(wanted, start=1):
            asked.append(pool.submit(ask, service, name, priority, client))
            wait_for(lambda number=number: router.num_requests == number)  # type: ignore[misc]
        assert len(router.debug_state().admission.queue) == 4
        service.steps.opened.set()
        for one in asked:
            one.result(20)
    assert order[:3] == ["first", "second", "third"]
    assert set(order[3:5]) == {"plain", "urgent"}
    assert set(order[5:]) == {"later", "latest"}


def test_a_burst_does_not_distort_the_forecast(folder: Path) -> None:
    """The duration of short answers that waited for a slot doesn't predict that of long ones."""
    engine = replace(FLOAT32, max_num_seqs=8)
    with served(folder, engine=engine, request_timeout=60.0) as service, ThreadPoolExecutor(32) as pool:
        router = service.running.frontend.router
        service.steps.close()
        long = [pool.submit(service.post, max_tokens=200) for _ in range(8)]
        wait_for(lambda: router.num_requests == 8)
        short = [pool.submit(service.post, max_tokens=1) for _ in range(8)]
        wait_for(lambda: router.num_requests == 16)
        began = time.monotonic()
        service.steps.opened.set()
        assert [answer.result(60).status_code for answer in (*long, *short)] == [200] * 16
        took = time.monotonic() - began
        forecast = router.debug_state().forecast
        _, work = forecast.seconds(1.0, forecast.cost_of(20, 200), 0.0, router.clock.now())
        assert 0 < work < 5 * took
        again = [pool.submit(service.post, max_tokens=200) for _ in range(4)]
        assert [answer.result(60).status_code for answer in again] == [200] * 4
