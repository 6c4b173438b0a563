"""Images by URL: only from allowed hosts and allowed folders."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Served, image, image_part, served, text_part, wait_for

GATE = threading.Event()


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = image(seed=3) if self.path == "/picture" else b"no picture"
        if self.path == "/waits":
            GATE.wait(10)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/picture")
        elif self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.2:{self.server.server_port}/picture")  # type: ignore[attr-defined]
        else:
            self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def pictures() -> Iterator[int]:
    """Yield the port of a web server that the service may fetch from."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        GATE.set()
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "picture.png").write_bytes(image(seed=3))
    return folder


@pytest.fixture(scope="module")
def fetching(folder: Path, files: Path, pictures: int) -> Iterator[Served]:
    settings: dict[str, Any] = {
        "allowed_media_domains": (f"127.0.0.1:{pictures}", f"127.0.0.2:{pictures}", "127.0.0.1:1"),
        "allowed_media_networks": ("127.0.0.1/32",),
        "allowed_local_media_path": str(files),
    }
    with served(folder, "1EPD", **settings) as service:
        yield service


def asked(service: Served, url: str) -> httpx.Response:
    return service.post([text_part("x"), {"type": "image_url", "image_url": {"url": url}}])


def test_an_image_is_the_same_wherever_it_comes_from(fetching: Served, pictures: int, files: Path) -> None:
    inline = fetching.text([text_part("x"), image_part(image(seed=3))])
    for url in (
        f"http://127.0.0.1:{pictures}/picture",
        f"http://127.0.0.1:{pictures}/moved",
        f"file://{files}/picture.png",
    ):
        answer = asked(fetching, url)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == inline


@pytest.mark.parametrize(
    ("url", "status", "code"),
    [
        ("http://localhost:{}/picture", 400, "media_not_allowed"),
        ("https://example.org/picture", 400, "media_not_allowed"),
        ("http://127.0.0.2:{}/picture", 400, "media_not_allowed"),
        ("http://127.0.0.1:{}/elsewhere", 400, "media_not_allowed"),
        ("http://me@127.0.0.1:{}/picture", 400, "media_not_allowed"),
        ("file:///etc/passwd", 400, "media_not_allowed"),
        ("/etc/passwd", 400, "invalid_value"),
        ("http://127.0.0.1:{}/missing", 422, "media_not_fetched"),
        ("http://127.0.0.1:1/picture", 422, "media_not_fetched"),
        ("http://127.0.0.1:{}/text", 400, "unsupported_media"),
        ("data:image/png;base64", 400, "invalid_value"),
        ("data:image/png;base64,!!!!", 400, "invalid_value"),
    ],
)
def test_other_urls_are_refused_by_name(fetching: Served, pictures: int, url: str, status: int, code: str) -> None:
    response = asked(fetching, url.format(pictures))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "/" not in error["message"], "no paths"


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}/picture", "file:///etc/passwd"])
def test_nothing_is_fetched_unless_allowed(service: Served, pictures: int, url: str) -> None:
    response = asked(service, url.format(pictures))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "media_not_allowed")


def test_a_disconnect_cancels_fetches(fetching: Served, pictures: int) -> None:
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=fetching.url, timeout=0.3, trust_env=False) as client:
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{pictures}/waits"}}
        client.post("/v1/chat/completions", json=fetching.body([part, part]))
    wait_for(lambda: not fetching.running.frontend.debug_state().num_fetches, 1.0)
    GATE.set()
