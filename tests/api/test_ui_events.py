"""Snapshots of the service, for many viewers, slow ones and such that leave."""

import json
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.frontends import Alone, alone
from tests.support.serving import Served, image, image_part, text_part, wait_for
from triptych.api.viewers import MAX_PER_CLIENT, MAX_RATE, MAX_VIEWERS, SILENCE
from triptych.config import LeaseConfig
from triptych.observe.pipeline import Pipeline

HELLO = b"GET /ui/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def snapshots(client: httpx.Client, path: str = "/ui/events") -> Generator[Pipeline, None, None]:
    with client.stream("GET", path) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield msgspec.json.decode(line.removeprefix("data: "), type=Pipeline, strict=True)


@contextmanager
def changing(frontend: Alone) -> Iterator[None]:
    """An event happens between any two snapshots."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.02):
            frontend.frontend.api.router.events.add("joined", "e7 joined as E")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def frontend(folder: Path) -> Iterator[Alone]:
    with alone(folder) as frontend:
        yield frontend


def test_a_snapshot_says_what_is_served_and_by_whom(service: Served) -> None:
    with service.client() as client:
        first = next(snapshots(client))
    assert (first.service.model, first.service.topology, first.service.ready) == (service.model, "1E1PD", True)
    assert [(one.name, one.role, one.state) for one in first.instances] == [
        ("e0", "E", "serving"), ("pd1", "PD", "serving"),
    ]  # fmt: skip
    assert [stage.name for stage in first.stages] == ["encode", "prefill", "decode"]
    assert {"e0 joined as E", "pd1 joined as PD"} <= {event.text for event in first.events}
    assert "kv_pages" in [pool.name for pool in first.instances[1].pools]


def test_requests_in_flight_are_shown_where_they_are(service: Served) -> None:
    service.encoder.close()
    body = service.body([image_part(image(seed=640)), text_part("what is here?")])
    with service.client() as client, ExitStack() as stack:
        ids = [f"request-{n}" for n in range(3)]
        for one in ids:
            asking = threading.Thread(target=ask, args=[service, body, one])
            asking.start()
            stack.callback(asking.join)
        stack.callback(service.encoder.opened.set)
        found = until(snapshots(client), lambda one: len(one.requests) == len(ids) and phases(one) == {"encoding"})
        assert [mark.id for mark in sorted(found.requests, key=lambda mark: mark.id)] == ids
        assert all(mark.instances[-1] == "pd1" and mark.num_items == 1 for mark in found.requests)
        assert any("e0" in mark.instances for mark in found.requests)
        assert found.service.num_requests == len(ids)
        assert "what is here" not in msgspec.json.encode(found).decode()


def ask(service: Served, body: dict[str, Any], name: str) -> None:
    with service.client() as client:
        assert client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": name}).status_code == 200


def phases(one: Pipeline) -> set[str]:
    return {mark.phase for mark in one.requests}


def until(stream: Iterator[Pipeline], condition: Any) -> Pipeline:
    deadline = time.monotonic() + 15
    for one in stream:
        if condition(one):
            return one
        assert time.monotonic() < deadline, one
    raise AssertionError("the stream has ended")


def test_the_verdict_of_a_service_whose_encoder_is_slow(service: Served) -> None:
    service.encoder.delay = 1.0
    with service.client() as client, ExitStack() as stack:
        for n in range(30):  # in batches of a few
            body = service.body([image_part(image(448, 448, seed=300 + n)), text_part("x")], max_tokens=1)
            asking = threading.Thread(target=ask, args=[service, body, f"slow-{n}"])
            asking.start()
            stack.callback(asking.join)
        stack.callback(setattr, service.encoder, "delay", 0.0)
        found = until(snapshots(client, "/ui/events?rate=2"), lambda one: one.verdict.stage == "encode")
    # on a machine with other work, the items may wait for their preprocessing instead of the tower
    assert found.verdict.sentence.startswith("Encode binds: ")
    assert "items wait" in found.verdict.sentence
    assert " % busy" in found.verdict.sentence
    assert found.verdict.advice.endswith(f"--control {service.running.frontend.control} E=2.")


def test_without_viewers_nothing_is_made_and_all_see_the_same(frontend: Alone) -> None:
    viewers = frontend.frontend.api.viewers
    wait_for(lambda: not len(viewers))
    sent = viewers.num_sent
    time.sleep(0.3)
    assert viewers.num_sent == sent
    with frontend.client() as one, frontend.client() as other:
        pairs = zip(snapshots(one), snapshots(other), strict=False)
        times = [pair for pair, _ in zip(pairs, range(5), strict=False)]
    seen = [{snapshot.time for snapshot in column} for column in zip(*times, strict=True)]
    assert seen[0] & seen[1], "each viewer got snapshots of its own"
    wait_for(lambda: not len(viewers))


def test_the_rate_is_what_the_viewer_asks_for(frontend: Alone) -> None:
    with frontend.client() as client, changing(frontend):
        for rate, least, most in ((10, 0.08, 0.4), (2, 0.45, 0.9)):
            stream = snapshots(client, f"/ui/events?rate={rate}")
            times = [next(stream).time for _ in range(5)]
            stream.close()
            assert times[-1] - times[0] >= 4 * least
            assert min(after - before for before, after in pairwise(times)) <= most, (
                "the others may come late on a busy machine"
            )
            wait_for(lambda: not len(frontend.frontend.api.viewers))
            time.sleep(2 / MAX_RATE)  # until the look that was due for it is over
        for wrong in ("0", "-1", "nan", "inf", "x", "1e400"):
            assert client.get(f"/ui/events?rate={wrong}").status_code == 400


@pytest.mark.parametrize("others", [0, 1])
def test_viewers_that_come_again_and_again_cost_no_more_snapshots(frontend: Alone, others: int) -> None:
    viewers = frontend.frontend.api.viewers
    wait_for(lambda: not len(viewers))
    with ExitStack() as stack:
        stack.enter_context(changing(frontend))
        for _ in range(others):
            next(stack.enter_context(closing(snapshots(stack.enter_context(frontend.client()), "/ui/events?rate=1"))))
        sent, began = viewers.num_sent, time.monotonic()
        for _ in range(40):
            with open_stream(frontend) as one:
                assert read_until(one, b"data: {")
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets at once
        assert viewers.num_sent - sent <= MAX_RATE * (time.monotonic() - began) + 1
    wait_for(lambda: not len(viewers))
    time.sleep(2 / MAX_RATE)  # what was seen just now is given to the next viewer


def read_until(one: socket.socket, end: bytes) -> bytes:
    """What the socket has until this, and what came with it."""
    read = b""
    while end not in read:
        more = one.recv(65536)
        assert more, read
        read += more
    return read


def test_what_has_not_changed_is_not_sent_again(frontend: Alone) -> None:
    with frontend.client() as client, closing(snapshots(client)) as stream:
        first, *rest = [next(stream) for _ in range(3)]
        # how busy the frontend is may change at any time
        assert rest == [msgspec.structs.replace(first, time=one.time, frontend=one.frontend) for one in rest]
        assert rest[1].time - rest[0].time >= SILENCE - 0.05


def test_a_change_is_sent_soon(frontend: Alone) -> None:
    with frontend.client() as client, closing(snapshots(client)) as stream:
        took = []
        for number in range(5):
            before = next(stream).events
            began = time.monotonic()
            frontend.frontend.api.router.events.add("joined", f"e{number} joined as E")
            assert next(one for one in stream if one.events != before)
            took.append(time.monotonic() - began)
        assert min(took) < SILENCE / 2, "the others may come late on a busy machine"


def test_a_viewer_that_asks_for_fewer_gets_the_last_change_in_its_time(frontend: Alone) -> None:
    router = frontend.frontend.api.router
    with frontend.client() as eager, frontend.client() as calm, closing(snapshots(eager)) as more:
        next(more)
        with closing(snapshots(calm, "/ui/events?rate=1")) as fewer:
            next(fewer)
            for number in range(3):
                router.events.add("joined", f"e{number} joined as E")
                next(more)
            assert [one.text for one in next(fewer).events][-3:] == [f"e{number} joined as E" for number in range(3)]


def test_streams_are_compressed_for_those_who_take_it_from_any_snapshot_on(frontend: Alone) -> None:
    router = frontend.frontend.api.router
    with frontend.client() as one, frontend.client() as other, closing(snapshots(one)) as early:
        seen = [next(early)]
        router.events.add("joined", "e8 joined as E")
        with other.stream("GET", "/ui/events", headers={"Accept-Encoding": "identity"}) as response:
            assert "content-encoding" not in response.headers
            assert next(response.iter_lines()).startswith('data: {"time":')
        with one.stream("GET", "/ui/events") as response:
            assert response.headers["content-encoding"] == "gzip"
        with closing(snapshots(other)) as late:
            router.events.add("joined", "e9 joined as E")
            wanted = next(one for one in late if one.events[-1].text.startswith("e9"))
        while seen[-1].events != wanted.events:
            seen.append(next(early))


def test_there_are_limits_to_viewers_and_those_that_leave_make_room(folder: Path) -> None:
    keys = [f"key-{number}" for number in range(3)]
    with alone(folder, api_key=tuple(keys)) as frontend, ExitStack() as stack:
        viewers = frontend.frontend.api.viewers
        assert MAX_VIEWERS == 2 * MAX_PER_CLIENT
        clients = [stack.enter_context(frontend.client(headers={"Authorization": f"Bearer {key}"})) for key in keys]

        def refused(client: httpx.Client) -> tuple[int, str]:
            answer = client.get("/ui/events")
            assert "retry-after" in answer.headers
            return answer.status_code, answer.json()["error"]["message"]

        streams = [stack.enter_context(open_stream(frontend, keys[0])) for _ in range(MAX_PER_CLIENT)]
        wait_for(lambda: len(viewers) == MAX_PER_CLIENT)
        assert refused(clients[0]) == (429, "16 viewers of this client watch already")
        streams += [stack.enter_context(open_stream(frontend, keys[1])) for _ in range(MAX_PER_CLIENT)]
        wait_for(lambda: len(viewers) == MAX_VIEWERS)
        assert refused(clients[2]) == (503, "32 viewers watch already")
        assert clients[2].get("/ui").status_code == 200
        for one in streams:
            one.close()
        wait_for(lambda: not len(viewers))
        assert next(snapshots(clients[2])).service.version


def test_a_viewer_that_pipelines_makes_room_when_it_leaves(frontend: Alone) -> None:
    viewers = frontend.frontend.api.viewers
    with open_stream(frontend) as one:
        one.sendall(HELLO * 2)
        wait_for(lambda: len(viewers) == 1)
    wait_for(lambda: not len(viewers))


def open_stream(frontend: Alone, key: str = "") -> socket.socket:
    """A viewer that has asked for snapshots, and reads none."""
    hello = HELLO.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {key}\r\n\r\n".encode()) if key else HELLO
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", int(frontend.url.rpartition(":")[2])))
    one.sendall(hello)
    return one


def test_a_viewer_that_reads_nothing_delays_no_other_and_no_end(folder: Path) -> None:
    with alone(folder) as frontend:
        service = frontend.frontend.api
        for number in range(200):  # so that a snapshot is larger than what sockets hold
            service.router.events.add("joined", f"e{number} " + "x" * 20_000)
        with open_stream(frontend) as stuck, frontend.client() as client:
            wait_for(lambda: len(service.viewers) == 1)
            reading = snapshots(client)
            times = [next(reading).time for _ in range(8)]
            assert times == sorted(set(times))
            began = time.monotonic()
            frontend.run(frontend.frontend.drain())
            assert time.monotonic() - began < LeaseConfig().drain_timeout / 2, "viewers held the end of the frontend"
            assert list(reading) is not None  # the stream has ended as a whole answer
            assert stuck.fileno() >= 0


@pytest.mark.parametrize("supervised", [False, True])
def test_a_stream_ends_when_the_frontend_does_and_its_viewer_hears_it(folder: Path, supervised: bool) -> None:
    with alone(folder, supervised=supervised) as frontend, frontend.client() as client:
        stream = snapshots(client)
        next(stream)
        draining = threading.Thread(target=lambda: frontend.run(frontend.frontend.drain()))
        draining.start()
        for _ in stream:
            pass
        draining.join(10)
        assert not draining.is_alive()
        if supervised:  # the next frontend accepts what comes now
            return
        answer = client.get("/ui/events")
        assert answer.status_code == 503
        assert json.loads(answer.content)["error"]["code"] == "overloaded"
