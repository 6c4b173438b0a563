"""Messages arrive late, twice and in another order, and writes of rows are broken: every answer is right, nothing
hangs, and nothing is left over."""

import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.disorder import disturb
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.messages.channel import Channel

slow = pytest.mark.slow
AT_ONCE = 16
PICTURES = 24
"""Pictures that the requests are about. Each request has a cache salt of its own, so no work is shared."""


SAMPLING = {"max_tokens": 12, "logprobs": True}
Answer = list[list[int]] | str


def tokens_in(response: httpx.Response) -> Answer:
    """The bytes of each token, or the error."""
    if response.status_code != 200:
        return f"{response.status_code}: {response.text}"
    return [token["bytes"] for token in response.json()["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("messages") / "tiny")


@pytest.fixture(scope="module")
def contents() -> list[object]:
    pictures = [[image_part(image(96 + 32 * (n % 3), 96, n)), text_part("What is it?")] for n in range(PICTURES)]
    return [*pictures, "Hello", "Tell me a story"]


@pytest.fixture(scope="module")
def right(folder: Path, contents: list[object]) -> list[Answer]:
    """The answers of one process whose messages arrive in order."""
    with served(folder, "1EPD") as service:
        return [tokens_in(service.post(content, **SAMPLING)) for content in contents]


@pytest.fixture(scope="module", params=["1E1P1D", "2E2PD"])
def service(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    with served(folder, request.param, request_timeout=60.0) as running:
        yield running


def channels_of(service: Served) -> list[Channel]:
    return [service.running.frontend.channel, *(instance.channel for instance in service.running.instances)]


def ask_all(url: str, service: Served, contents: list[object], right: list[Answer], number: int) -> list[Answer]:
    """Ask that many times, several at a time, each with a cache salt of its own. Return the wrong answers."""

    def ask(n: int) -> Answer:
        body = service.body(contents[n % len(contents)], model="tiny", cache_salt=secrets.token_hex(4), **SAMPLING)
        with httpx.Client(base_url=url, trust_env=False, timeout=90) as client:
            return tokens_in(client.post(CHAT, json=body))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(number)))
    return [answer for n, answer in enumerate(answers) if answer != right[n % len(contents)]]


@pytest.mark.parametrize(
    ("share", "number"), [(0.01, 64), pytest.param(0.01, 2000, marks=slow), pytest.param(0.05, 500, marks=slow)]
)
def test_no_answer_is_lost_or_wrong(
    service: Served, contents: list[object], right: list[Answer], share: float, number: int
) -> None:
    disturbed = disturb(channels_of(service), delay=share, duplicate=share, reorder=share)
    try:
        wrong = ask_all(service.url, service, contents, right, number)
        counts = sum((one.counts for one in disturbed), Counter[str]())
        print(counts.total(), counts)
        assert not wrong, (len(wrong), wrong[:5])
        assert counts.total() > number / 4
    finally:
        for one in disturbed:
            one.restore()
    wait_for(service.everything_is_back, 5)


@pytest.mark.parametrize(
    ("share", "number"),
    [
        (0.05, 200),
        pytest.param(0.2, 200, marks=slow),
        pytest.param(0.05, 10_000, marks=slow),
        pytest.param(0.2, 10_000, marks=slow),
    ],
)
def test_broken_writes_are_mended(
    service: Served, folder: Path, contents: list[object], right: list[Answer], share: float, number: int
) -> None:
    """Of that share of all writes each is broken in one of six ways. An error with a name is rare, and a wrong answer
    never comes; ``service`` only says what to ask."""
    broken = ",".join(
        f"{fault}={share / 6:.4f}" for fault in ("drop", "delay", "duplicate", "reorder", "corrupt", "half")
    )
    flags = (*FAST, "--topology", "1E1P1D", "--served-model-name", "tiny", "--inject-faults", f"{broken},seconds=0.2")
    with triptych("serve", folder, *flags) as command:
        command.wait_for_line("^ready: ", START)
        wrong = ask_all(command.wait_until_ready(), service, contents, right, number)
        print(f"{len(wrong)} of {number} failed, {command.text.count('are corrupt')} writes were corrupt")
        assert all(isinstance(answer, str) and '"code":"internal_error"' in answer for answer in wrong), wrong[:3]
        assert len(wrong) <= number * share**3
        assert "while idle" not in command.text
