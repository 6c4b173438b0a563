"""The network between two hosts is cut under load, for a while or for good, also in one direction only."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import FAST, wait_for
from tests.support.commands import Command, triptych
from tests.support.namespaces import Host, two_hosts
from tests.support.serving import CHAT, Served, image, image_part, served, text_part
from triptych.transfer.fabrics.opening import is_installed

slow = pytest.mark.slow
AT_ONCE = 64
LEASE = 2.0
ADDED = 3.0
"""Seconds by which a cut may delay answers, besides its own length."""
TIMEOUT = 60.0
LONG = 30.0
REJOIN = 5.0
"""Seconds within which instances join again when the network is back."""
Answer = tuple[int, str]


@dataclass
class Hosts:
    """A frontend, an encode and a language instance ``here``, and the same instances once more ``there``."""

    here: Host
    there: Host
    reference: Served
    url: str = ""
    parts: dict[str, Command] = field(default_factory=dict)
    asked: int = 0

    def answer(self, content: Any) -> tuple[Answer, float]:
        """An answer and how many seconds it took, for a thread that is on the host."""
        began = time.monotonic()
        with httpx.Client(base_url=self.url, trust_env=False, timeout=TIMEOUT + 10) as client:
            response = client.post(CHAT, json=self.reference.body(content, model="tiny"))
        body = response.json()
        text = body["choices"][0]["message"]["content"] if response.status_code == 200 else body["error"]["code"]
        return (response.status_code, text), time.monotonic() - began

    def contents(self) -> list[Any]:
        """Questions about new pictures."""
        self.asked += AT_ONCE
        pictures = (image(96, 96, self.asked - number) for number in range(AT_ONCE))
        return [[image_part(picture), text_part("What is it?")] for picture in pictures]

    def cut(self, *directions: str) -> None:
        if "out" in directions:
            self.here.lose_packets_to(self.there)
        if "in" in directions:
            self.there.lose_packets_to(self.here)

    def mend(self, *directions: str) -> None:
        if "out" in directions:
            self.here.reach(self.there)
        if "in" in directions:
            self.there.reach(self.here)

    def wait_until_whole(self, seconds: float) -> None:
        """Wait until all that were lost have joined again."""
        wait_for(lambda: self.parts["door"].text.count("sent no heartbeat") + 4 <= self.num_joined(), seconds)

    def num_joined(self) -> int:
        return self.parts["door"].text.count(" joined as ")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if not is_installed("nixl"):
        pytest.skip("nothing carries rows from host to host: pip install '.[nixl]' in a checkout")
    folder = make_checkpoint(tmp_path_factory.mktemp("network") / "tiny")
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex())
    with ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        service = Hosts(here, there, stack.enter_context(served(folder, "1EPD")))

        def serve(name: str, host: Host, *flags: str) -> None:
            every = ("--cluster-secret-file", str(secret), "--cluster-host", host.address)
            command = triptych("serve", folder, *flags, *every, prefix=host.prefix)
            service.parts[name] = stack.enter_context(command)

        door = ("--port", "0", "--control-port", "8001", "--request-timeout", str(TIMEOUT))
        serve("door", here, "--role", "frontend", "--served-model-name", "tiny", *door)
        for name, role, host in (("e0", "E", here), ("pd0", "PD", here), ("e1", "E", there), ("pd1", "PD", there)):
            serve(name, host, "--role", role, "--name", name, *FAST, "--join", f"{here.address}:8001")
        service.url = service.parts["door"].wait_until_ready()
        wait_for(lambda: service.num_joined() == 4, 60)
        yield service
        assert all("while idle" not in command.text for command in service.parts.values())


@pytest.fixture
def clients(hosts: Hosts) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(AT_ONCE, initializer=hosts.here.enter) as pool:
        yield pool


BOTH = ("out", "in")


@pytest.mark.parametrize(
    ("seconds", "directions"),
    [
        pytest.param(1.0, BOTH, marks=slow),
        pytest.param(5.0, BOTH, marks=slow),
        pytest.param(5.0, ("in",), marks=slow, id="5.0-in"),
        pytest.param(5.0, ("out",), marks=slow, id="5.0-out"),
        pytest.param(0.0, ("in",), marks=slow, id="good-in"),
        pytest.param(0.0, ("out",), marks=slow, id="good-out"),
        pytest.param(0.0, BOTH, marks=slow, id="good-both"),
    ],
)
def test_a_cut_delays_answers_and_loses_none(
    hosts: Hosts, clients: ThreadPoolExecutor, seconds: float, directions: tuple[str, ...]
) -> None:
    """``seconds`` of 0 is a cut that lasts until all is answered."""
    contents = hosts.contents()
    usual = sorted(clients.submit(hosts.answer, content).result()[1] for content in hosts.contents()[:2])
    list(clients.map(hosts.answer, hosts.contents()))
    before = sorted(took for _, took in clients.map(hosts.answer, hosts.contents()))
    asked = [clients.submit(hosts.answer, content) for content in contents]
    wait_for(lambda: sum(one.done() for one in asked) >= 4, 30)
    joined = hosts.num_joined()
    hosts.cut(*directions)
    began = time.monotonic()
    try:
        wait(asked, timeout=seconds or 2 * TIMEOUT)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
    finally:
        hosts.mend(*directions)
    answers = [one.result(2 * TIMEOUT) for one in asked]
    ended = time.monotonic()
    times = sorted(took for _, took in answers)
    print(f"alone {usual[-1]:.2f} s; all {before[-1]:.2f} s; cut {seconds:g} s {directions}: to {times[-1]:.2f} s")
    right = [(200, hosts.reference.text(content)) for content in contents]
    assert [answer for answer, _ in answers] == right
    assert times[-1] - before[-1] <= ADDED + (seconds or LEASE)
    if hosts.num_joined() > joined or seconds == 0:
        print(f"joined again {time.monotonic() - ended:.2f} s after")
    hosts.wait_until_whole(20)


@slow
def test_instances_join_again_soon_after_a_long_cut(hosts: Hosts, clients: ThreadPoolExecutor) -> None:
    """Though TCP has waited longer and longer between its attempts, and would for up to two minutes."""
    hosts.cut(*BOTH)
    try:
        time.sleep(LONG)
    finally:
        hosts.mend(*BOTH)
    assert clients.submit(hosts.answer, "Hello").result()[0][0] == 200
    began = time.monotonic()
    hosts.wait_until_whole(20)
    print(f"joined again {time.monotonic() - began:.2f} s after a cut of {LONG:g} s")
    assert time.monotonic() - began < REJOIN
    contents = hosts.contents()
    right = [(200, hosts.reference.text(content)) for content in contents]
    assert [answer for answer, _ in clients.map(hosts.answer, contents)] == right
