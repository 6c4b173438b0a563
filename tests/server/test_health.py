"""An instance's own HTTP port: what probes see, and what other clients may send."""

import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from triptych.clock import SystemClock
from triptych.errors import StartError
from triptych.messages.stats import CacheTier, EncodeStats, InstanceStats
from triptych.server import health as health_module
from triptych.server.health import MAX_CONNECTIONS, MAX_HEAD, HealthServer
from triptych.server.pulse import Pulse
from triptych.topology import Role

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[HealthServer]:
    made = HealthServer(HOST, 0, Pulse("e0", Role.E, SystemClock()))
    yield made
    made.close()


def get(server: HealthServer, path: str) -> httpx.Response:
    return httpx.get(f"http://{HOST}:{server.port}{path}", trust_env=False, timeout=10)


def answer(server: HealthServer, sent: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection((HOST, server.port), timeout=10) as client:
        client.sendall(sent)
        received = b""
        while data := client.recv(65536):
            received += data
    return received


def test_probes_tell_loading_ready_and_stuck_apart(server: HealthServer) -> None:
    assert (get(server, "/health").status_code, get(server, "/ready").text) == (200, "loading the model\n")
    assert get(server, "/ready").status_code == 503
    server.pulse.ticked, server.pulse.not_ready = server.pulse.clock.now(), ""
    assert (get(server, "/health").text, get(server, "/ready").status_code) == ("ok\n", 200)
    server.pulse.ticked -= server.pulse.max_silence + 1
    assert get(server, "/health").status_code == get(server, "/ready").status_code == 503
    assert "no turn of the loop for 6." in get(server, "/health").text


def test_metrics_are_those_of_the_last_heartbeat(server: HealthServer) -> None:
    text = get(server, "/metrics").text
    assert "process_resident_memory_bytes" in text
    assert 'triptych:mm_items_encoded_total{instance_name="e0"' not in text
    encode = EncodeStats(
        waiting=1, running=2, encoded=7, cache_queries=0, cache_hits=0, cache_bytes=0, cache_max_bytes=0
    )
    encode.patches, encode.batches, encode.tower_seconds = 900, 3, 1.5
    encode.tiers = [CacheTier("memory", 4, 100), CacheTier("shm", 5, 200)]
    server.pulse.stats = InstanceStats(encode=encode, busy_seconds=1.5)
    text = get(server, "/metrics?x=1").text
    assert 'triptych:mm_items_encoded_total{instance_name="e0",role="E"} 7.0' in text
    assert 'triptych:instance_busy_seconds_total{instance_name="e0",role="E"} 1.5' in text
    assert 'triptych:mm_cache_tier_hits_total{instance_name="e0",role="E",tier="shm"} 5.0' in text
    assert 'triptych:mm_cache_tier_bytes{instance_name="e0",role="E",tier="memory"} 100.0' in text
    assert 'triptych:mm_patches_encoded_total{instance_name="e0",role="E"} 900.0' in text
    assert 'triptych:mm_encode_seconds_total{instance_name="e0",role="E"} 1.5' in text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\xff\r\n\r\n", 400),
        (b"GET /health extra HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * 2 * MAX_HEAD + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_probe_is_refused(server: HealthServer, sent: bytes, status: int) -> None:
    assert answer(server, sent).startswith(b"HTTP/1.1 %d " % status)
    assert get(server, "/health").status_code == 200


def test_head_has_no_body(server: HealthServer) -> None:
    head, _, body = answer(server, b"HEAD /health HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert b"Content-Length: 3" in head
    assert body == b""


def test_idle_connections_are_closed_and_keep_no_place(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "REQUEST_SECONDS", 0.3)
    idle = [socket.create_connection((HOST, server.port), timeout=10) for _ in range(MAX_CONNECTIONS + 5)]
    try:
        assert all(client.recv(1) == b"" for client in idle)
    finally:
        for client in idle:
            client.close()
    assert get(server, "/health").status_code == 200


def test_a_port_in_use_is_named(server: HealthServer) -> None:
    taken = f"--health-port {server.port}: can't listen on 127.0.0.1:{server.port}: Address already in use"
    with pytest.raises(StartError, match=rf"{taken} by process {os.getpid()} \(.*python"):
        HealthServer(HOST, server.port, Pulse("e1", Role.E, SystemClock()))
