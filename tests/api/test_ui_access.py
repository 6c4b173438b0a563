"""Who may see the page at /ui, its files and its data, and the headers of every answer."""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.frontends import Alone, alone
from triptych.api.ui_access import HEADERS
from triptych.api.ui_files import ui_files
from triptych.ui import FOLDER

KEY = "sk-of-the-viewer"
DATA = "/ui/requests"
"""Data, that is: for those alone who may see the service."""


@pytest.fixture(scope="module")
def open_frontend(folder: Path) -> Iterator[Alone]:
    with alone(folder, allowed_origins=("https://app.example.org",)) as frontend:
        yield frontend


@pytest.fixture(scope="module")
def guarded_frontend(folder: Path) -> Iterator[Alone]:
    with alone(folder, api_key=(KEY,)) as frontend:
        yield frontend


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.9.9.9"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_sees_the_data(open_frontend: Alone, peer: str, host: str) -> None:
    assert open_frontend.ask_as(peer, DATA, {"Host": host}).status_code == 200
    assert open_frontend.ask_as(peer, DATA, {"Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("192.0.2.7", {"Host": "127.0.0.1:8000"}),
        ("2001:db8::1", {"Host": "localhost"}),
        ("::ffff:192.0.2.7", {"Host": "localhost"}),
        ("127.0.0.1", {"Host": "rebound.example.org:8000"}),
        ("127.0.0.1", {"Host": "127.0.0.1.example.org"}),
        ("127.0.0.1", {"Host": "localhost.example.org"}),
        ("127.0.0.1", {"Host": "localhost@example.org"}),
        ("127.0.0.1", {"Host": "127.0.0.1:8000:1"}),
        ("127.0.0.1", {"Host": ""}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Origin": "https://evil.example.org"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Origin": "https://app.example.org"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Origin": "null"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Sec-Fetch-Site": "cross-site"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Sec-Fetch-Site": "same-site"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "X-Forwarded-For": "127.0.0.1"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Forwarded": "for=192.0.2.7"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "X-Real-IP": "192.0.2.7"}),
        ("127.0.0.1", {"Host": "127.0.0.1", "Via": "1.1 proxy"}),
        ("192.0.2.7", {"Host": "127.0.0.1", "Authorization": f"Bearer {KEY}"}),
    ],
)
@pytest.mark.parametrize("path", [DATA, "/ui/events"])
def test_without_keys_others_get_403_that_says_what_to_do(
    open_frontend: Alone, peer: str, headers: dict[str, str], path: str
) -> None:
    response = open_frontend.ask_as(peer, path, headers)
    assert response.status_code == 403
    assert "--api-key-file" in response.text
    assert response.headers["content-type"].startswith("text/plain")
    assert open_frontend.ask_as(peer, "/ui", headers).status_code == 200  # the page says the same, and asks for a key


def test_with_keys_the_data_needs_one_wherever_it_is_asked_for(guarded_frontend: Alone) -> None:
    for peer in ("127.0.0.1", "192.0.2.7"):
        for host in ("127.0.0.1:8000", "triptych.example.org"):
            for path in (DATA, "/ui/events"):
                assert guarded_frontend.ask_as(peer, path, {"Host": host}).status_code == 401
                wrong = {"Host": host, "Authorization": "Bearer wrong"}
                assert guarded_frontend.ask_as(peer, path, wrong).status_code == 401
            right = {"Host": host, "Authorization": f"Bearer {KEY}"}
            assert guarded_frontend.ask_as(peer, DATA, right).status_code == 200
            assert guarded_frontend.ask_as(peer, f"{DATA}?api_key={KEY}", {"Host": host}).status_code == 401
    for path in ui_files():
        assert guarded_frontend.ask_as("192.0.2.7", path, {}).status_code == 200
    assert guarded_frontend.ask_as("192.0.2.7", "/ui/", {}).headers["location"] == "../ui"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../pyproject.toml",
        "/ui/..%2fapi%2fui.py",
        "/ui/%2e%2e/api/ui.py",
        "/ui/__init__.py",
        "/ui/./index.html",
        "/ui//etc/passwd",
        "/ui/%2fetc%2fpasswd",
        "/ui/index.html%00.js",
        "/ui/..\\api\\ui.py",
        f"/ui/{'x' * 9000}",
        "/ui/UI.css",
    ],
)
def test_only_the_files_of_the_page_are_served(open_frontend: Alone, guarded_frontend: Alone, path: str) -> None:
    for frontend, expected in ((open_frontend, 404), (guarded_frontend, 401)):
        port = int(frontend.url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)  # sends the path as it is
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == expected
        assert answer.getheader("content-security-policy") == HEADERS["Content-Security-Policy"]
        connection.close()


def test_every_answer_has_the_headers(open_frontend: Alone, guarded_frontend: Alone) -> None:
    cases = [("GET", path) for path in ("/ui", "/ui/", "/ui/nothing", DATA, "/ui/events?rate=x")]
    cases += [("POST", "/ui"), ("DELETE", DATA), ("HEAD", "/ui"), ("OPTIONS", "/ui"), ("PUT", "/ui/events")]
    for frontend in (open_frontend, guarded_frontend):
        with frontend.client() as client:
            for method, path in cases:
                answer = client.request(method, path)
                assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, (method, path)
            assert "content-security-policy" not in client.get("/health").headers
            assert "content-security-policy" not in client.get("/uid").headers


def test_methods(open_frontend: Alone) -> None:
    with open_frontend.client() as client:
        assert client.head("/ui").status_code == 200
        assert not client.head("/ui").content
        for method, path in (("POST", "/ui"), ("HEAD", "/ui/events"), ("POST", "/ui/events"), ("DELETE", DATA)):
            assert client.request(method, path).status_code in (404, 405), (method, path)
        assert client.get("/ui/", follow_redirects=True).content == client.get("/ui").content


def test_files_are_sent_whole_small_or_not_at_all(open_frontend: Alone) -> None:
    with open_frontend.client() as client:
        page = client.get("/ui")
        assert page.content == (FOLDER / "index.html").read_bytes()
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert client.get("/ui", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
        for path, file in ui_files().items():
            plain, small = (client.get(path, headers={"Accept-Encoding": one}) for one in ("identity", "gzip"))
            assert plain.content == small.content == file.content
            assert "content-encoding" not in plain.headers


def test_no_ui_turns_all_of_it_off(folder: Path) -> None:
    with alone(folder, ui=False) as frontend, frontend.client() as client:
        for path in (*ui_files(), DATA, "/ui/events", "/ui/"):
            assert client.get(path, follow_redirects=True).status_code == 404
        assert client.get("/health").status_code == 200


def test_the_page_is_not_in_the_openapi_schema(open_frontend: Alone) -> None:
    with open_frontend.client() as client:
        assert not [path for path in client.get("/openapi.json").json()["paths"] if path.startswith("/ui")]
