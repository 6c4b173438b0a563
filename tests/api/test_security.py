"""Keys, CORS and TLS over HTTP, and no internals in errors."""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.certificates import make_certificate
from tests.support.frontends import Alone, alone
from tests.support.serving import CHAT, Served, image_part, served, text_part
from triptych.api.security import ApiKeys
from triptych.config import AuthConfig, TlsConfig
from triptych.errors import ConfigError

FIRST, SECOND, THIRD = "sk-first", "sk-second", "sk-third"
ORIGIN = "https://app.example.org"


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{SECOND}\n\n  {THIRD}  \n")
    file.chmod(0o600)
    settings: dict[str, Any] = {"api_key": (FIRST,), "api_key_file": str(file), "allowed_origins": (ORIGIN,)}
    with served(folder, "1PD", **settings) as service:
        yield service


def asked(service: Served, headers: dict[str, str], path: str = CHAT) -> httpx.Response:
    with service.client() as client:
        if path == CHAT:
            return client.post(path, json=service.body(), headers=headers)
        return client.get(path, headers=headers)


@pytest.mark.parametrize("key", [FIRST, SECOND, THIRD])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_valid_key_is_accepted(guarded: Served, key: str, scheme: str) -> None:
    assert asked(guarded, {"Authorization": f"{scheme} {key}"}).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", f"Basic {FIRST}", FIRST, "Bearer sk-firs", f"Bearer {FIRST}x", f"Bearer {FIRST} x",
     f"Bearer {FIRST},{SECOND}", f"Bearer {FIRST}\u00e9", "Bearer " + "x" * 20_000],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing", "//health", "/health/"])
def test_a_missing_or_invalid_key_is_refused(guarded: Served, authorization: str | None, path: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    response = asked(guarded, headers, path)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert FIRST not in response.text


def test_probes_need_no_key(guarded: Served) -> None:
    for path in ("/health", "/ready"):
        assert asked(guarded, {}, path).status_code == 200


def test_openais_client_raises_its_authentication_error(guarded: Served) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=guarded.model, messages=messages)
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=SECOND, max_retries=0) as client:
        assert client.chat.completions.create(model=guarded.model, messages=messages, max_tokens=2).choices


def test_keys_are_not_stored() -> None:
    keys = ApiKeys([FIRST])
    assert FIRST not in repr(vars(keys))
    assert keys.identify(FIRST) == keys.identify(FIRST) != ApiKeys([FIRST]).identify(FIRST)


@pytest.mark.parametrize("key", ["", " ", "a b", "\u00e9", "a\n", "x" * 513])
def test_malformed_keys(key: str) -> None:
    with pytest.raises(ConfigError, match="API key") as caught:
        ApiKeys([key])
    assert not key.strip() or key not in str(caught.value)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="can't be read"):
        AuthConfig(api_key_file=str(file)).api_keys()
    file.write_text("\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="no key"):
        AuthConfig(api_key_file=str(file)).api_keys()
    file.write_text("a\nb\n")
    assert AuthConfig(api_key_file=str(file), api_key=("c",)).api_keys() == ["c", "a", "b"]
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="0640"):
        AuthConfig(api_key_file=str(file)).api_keys()


# ── web pages, without keys ──────────────────────────────────────────────────────────────────────────────────

EVIL = "https://evil.example.org"
OPEN_PATHS = (CHAT, "/v1/models", "/metrics", "/tokenize", "/v1/messages", "/nothing")


@pytest.fixture(scope="module")
def keyless(folder: Path) -> Iterator[Alone]:
    with alone(folder, allowed_origins=(ORIGIN,), allowed_hosts=("proxy.example.org",)) as frontend:
        yield frontend


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        {"Origin": EVIL},
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Host": "rebound.example.org:8000"},
        {"Host": "rebound.example.org:8000", "Origin": "http://rebound.example.org:8000"},
        {"Host": "rebound.example.org", "Sec-Fetch-Site": "same-origin", "X-Forwarded-For": "192.0.2.7"},
        {"Host": "127.0.0.1.example.org"},
        {"Host": "proxy.example.org.evil.example.org"},
        {"Host": ""},
    ],
)
@pytest.mark.parametrize("path", OPEN_PATHS)
def test_without_keys_pages_of_others_are_refused(keyless: Alone, path: str, headers: dict[str, str]) -> None:
    for method in ("GET", "POST"):
        response = keyless.ask_as("127.0.0.1", path, headers, method)
        assert response.status_code == 403
        assert "--allowed-" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:8000", "Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8000"},
        {"Host": "[::1]:8000", "Sec-Fetch-Site": "none"},
        {"Host": "PROXY.example.org", "X-Forwarded-For": "192.0.2.7"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_without_keys_all_others_are_served(keyless: Alone, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/version"):
        assert keyless.ask_as("127.0.0.1", path, headers).status_code == 200
    assert keyless.ask_as("127.0.0.1", "/health", {"Host": "pod.example.org"}).status_code == 200


def test_with_keys_pages_need_one_and_no_more(guarded: Served) -> None:
    headers = {"Host": "rebound.example.org", "Origin": EVIL, "Sec-Fetch-Site": "cross-site"}
    assert asked(guarded, headers, "/v1/models").status_code == 401
    assert asked(guarded, headers | {"Authorization": f"Bearer {FIRST}"}, "/v1/models").status_code == 200


def test_beyond_loopback_hosts_have_any_name_and_the_log_warns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone(folder, host="0.0.0.0") as frontend:
        assert "without API keys" in caplog.text
        assert frontend.ask_as("192.0.2.7", "/v1/models", {"Host": "any.example.org"}).status_code == 200
        assert frontend.ask_as("192.0.2.7", "/v1/models", {"Origin": EVIL}).status_code == 403


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_without_a_valid_key_is_its_address(folder: Path, keyless: Alone) -> None:
    """Otherwise each request could be of another client, and no limit per client would hold."""

    def clients_of(frontend: Alone) -> set[str]:
        for number in range(3):
            headers = {"Authorization": f"Bearer {number}", "X-Team": str(number % 2)}
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            with frontend.client() as client:
                client.post(CHAT, json=body, headers={"X-Request-Timeout": "0.1"} | headers)
        return {view.client for view in frontend.frontend.api.history}

    assert len(clients_of(keyless)) == 1
    with alone(folder, client_header="X-Team") as frontend:
        assert len(clients_of(frontend)) == 2


# ── CORS ─────────────────────────────────────────────────────────────────────────────────────────────────────


BROWSER = "authorization,content-type,x-stainless-lang,x-stainless-os,x-stainless-retry-count,x-stainless-timeout"
"""Headers that OpenAI's JavaScript client sends from a web page."""


def preflight(service: Served, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": BROWSER,
    }
    with service.client() as client:
        return client.options(CHAT, headers=headers)


def test_cors_is_off_by_default(service: Served) -> None:
    assert preflight(service, ORIGIN).status_code == 405
    response = asked(service, {"Origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_cors_is_for_the_named_origins(guarded: Served) -> None:
    allowed = preflight(guarded, ORIGIN)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert set(BROWSER.split(",")) <= set(re.split(", ?", allowed.headers["access-control-allow-headers"].lower()))
    assert "access-control-allow-credentials" not in allowed.headers
    assert preflight(guarded, "https://evil.example.org").status_code == 400
    response = asked(guarded, {"Origin": ORIGIN, "Authorization": f"Bearer {FIRST}"})
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-origin" not in asked(guarded, {"Origin": "https://evil.example.org"}).headers


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")
    return str(cert), str(key)


def test_tls(folder: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with served(folder, "1PD", ssl_certfile=cert, ssl_keyfile=key) as service:
        assert service.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=service.url, verify=context, trust_env=False, timeout=20) as client:
            assert client.post(CHAT, json=service.body()).status_code == 200
            with client.stream("POST", CHAT, json=service.body(stream=True)) as response:
                assert list(response.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(service.url.replace("https", "http") + "/health", trust_env=False)


def test_invalid_certificates(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    TlsConfig(ssl_certfile=cert, ssl_keyfile=key).check_files()
    with pytest.raises(ConfigError, match="go together"):
        TlsConfig(ssl_certfile=cert)
    open_key = tmp_path / "key.pem"
    open_key.write_bytes(Path(key).read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        TlsConfig(ssl_certfile=cert, ssl_keyfile=str(open_key)).check_files()
    for wrong_cert, wrong_key in ((cert, str(tmp_path / "missing")), (str(tmp_path / "missing"), key), (key, key)):
        with pytest.raises(ConfigError, match="ssl-"):
            TlsConfig(ssl_certfile=wrong_cert, ssl_keyfile=wrong_key).check_files()


# ── what errors don't say ────────────────────────────────────────────────────────────────────────────────────

INNER = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|File \"|, line \d+, in|\.py\b|(?<![\w.])/(?!v1\b)[a-z]+/|tcp://|ipc://|site-packages|\btriptych\."
)
"""Memory addresses, paths, stack traces and inner endpoints."""


def wrong_requests(service: Served) -> Iterator[httpx.Response]:
    with service.client() as client:
        for content in (b"", b"{", b"[1]", b'"x"', b"\xff", b'{"model": 1}', b'{"a": "/etc/passwd"'):
            yield client.post(CHAT, content=content)
        for path in ("/nothing", "/v1/nothing", "/v1/chat", "/%00", "/..%2f..%2fetc%2fpasswd", "/docs/../x"):
            yield client.get(path)
        yield client.put(CHAT)
    pictures = [
        b"",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"BM" + bytes(60),
        b"\xff\xd8\xff\xe0" + bytes(60),
    ]
    for picture in pictures:
        yield service.post([image_part(picture)])
    for url in ("file:///etc/passwd", "http://127.0.0.1/x", "ftp://x/", "data:x", "//x", "http://[", "C:\\x"):
        yield service.post([text_part("x"), {"type": "image_url", "image_url": {"url": url}}])
    for structured in (
        {"regex": "("}, {"regex": "a{1000000000}"}, {"regex": "(?<=a)b"}, {"grammar": "root ::= "}, {"grammar": "x"},
        {"json": {"type": "nothing"}}, {"json": {"$ref": "#/x"}}, {"json": {"type": "string", "pattern": "["}},
        {"json": "{"},
    ):  # fmt: skip
        yield service.post(structured_outputs=structured)
    for settings in (
        {"temperature": 9},
        {"n": 1000},
        {"max_tokens": 10**9},
        {"stop": [""]},
        {"x": 1},
        {"logit_bias": {"a": 1}},
    ):
        yield service.post(**settings)
    service.steps.failures = service.encoder.failures = 1000  # each is tried again
    yield service.post([image_part(), text_part("fails")])
    yield service.post("fails too")
    service.steps.failures = service.encoder.failures = 0


def test_no_error_reveals_internals(service: Served) -> None:
    statuses = set()
    for response in wrong_requests(service):
        statuses.add(response.status_code)
        if response.status_code != 200:
            message = response.json()["error"]["message"]
            assert not INNER.search(message), message
    assert {400, 404, 405, 500} <= statuses


def test_the_check_for_internals_finds_them() -> None:
    for text in ("at 0x7f00aabbcc", "in /usr/lib/x", 'File "x.py", line 3', "tcp://127.0.0.1:5", "triptych.server"):
        assert INNER.search(text)
    assert not INNER.search("POST /v1/chat/completions took application/json")
