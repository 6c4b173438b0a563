"""The chart's pods, run as processes in network namespaces: started, deleted under load, scaled and upgraded."""

import shutil
import signal
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from scripts.kubernetes_manifests import CHART
from tests.support.certificates import make_certificate
from tests.support.manifests import Document, read
from tests.support.pods import Pods, pods
from tests.support.serving import image, image_part, text_part

pytestmark = pytest.mark.slow

DEMO = CHART.parent / "examples" / "demo.yaml"
SETTINGS = (
    "frontend.replicas=3",
    "drainSeconds=30",
    'fabric="nixl"',  # pods share no memory, but these processes could
    'roles.E.args=["--dtype","float32"]',
    'roles.PD.args=["--dtype","float32"]',
)
Render = Callable[..., str]


@pytest.fixture(scope="module")
def service(render: Render, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("pods"), cache) as network:
        network.apply(manifests(render))
        network.wait_until_ready()
        yield network


def manifests(render: Render, *settings: str, chart: Path = CHART) -> list[Document]:
    return read(render(DEMO, *SETTINGS, *settings, chart=chart))


@dataclass
class Load:
    """Clients that ask one after the other, of any frontend that a Service would send them to. Each keeps its
    connections, as clients of a Service do, and opens one only when its last was closed."""

    service: Pods
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._ask, args=[number], daemon=True) for number in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, number: int) -> None:
        self.service.client.enter()
        content = [image_part(image(96, 96, number)), text_part("What is in the picture?")]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
            "seed": number,
        }
        while not self._ending.is_set():
            if not (urls := self.service.endpoints()):
                self.problems.append("no frontend receives connections")
                return
            url = urls[(number + sum(self.answers.values())) % len(urls)]
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                self._ask_there(client, number, body)

    def _ask_there(self, client: httpx.Client, number: int, body: dict[str, object]) -> None:
        """Ask until the frontend closes the connection, at most 20 times."""
        for _ in range(20):
            try:
                reply = client.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                self.problems.append(f"{client.base_url}: {error!r}")
                return
            if reply.status_code == 200:
                self.answers[number, reply.json()["choices"][0]["message"]["content"]] += 1
            else:
                self.problems.append(f"{client.base_url}: {reply.status_code} {reply.text}")
            if reply.headers.get("connection") == "close" or self._ending.is_set():
                return

    def check(self) -> None:
        assert self.problems == []
        assert sum(self.answers.values()) > 20
        assert len({number for number, _ in self.answers}) == len(self.answers), "the same question, another answer"


def test_the_pods_get_ready_by_their_probes_and_answer(service: Pods) -> None:
    assert len(service.of("frontend")) == 3
    assert len(service.endpoints()) == 3
    with Load(service) as load:
        time.sleep(10)
    load.check()
    for pod in service.running.values():
        assert stat.S_IMODE((pod.path("secrets") / "secret").stat().st_mode) == 0o400
        assert pod.restarts == 0, pod.log
    assert any(" joined as E" in pod.log for pod in service.of("frontend"))


def test_pods_that_are_deleted_under_load_lose_no_request(service: Pods, render: Render) -> None:
    two = manifests(render, "roles.E.replicas=2", "roles.PD.replicas=2")
    service.apply(two)
    service.wait_until_ready()
    with Load(service) as load:
        time.sleep(3)
        for component in ("pd", "e", "frontend"):
            pod = service.delete(service.of(component)[-1].name)
            assert pod.exit_codes == [0], pod.log
            service.apply(two)
            service.wait_until_ready()
    load.check()


def test_an_instance_whose_machine_is_lost_loses_no_request(service: Pods, render: Render) -> None:
    two = manifests(render, "roles.E.replicas=2", "roles.PD.replicas=2")
    service.apply(two)
    service.wait_until_ready()
    with Load(service) as load:
        time.sleep(3)
        for component in ("pd", "e"):
            lost = service.of(component)[-1]
            lost.kill()
            service.ended.append(service.running.pop(lost.name))
            service.apply(two)
            service.wait_until_ready()
    load.check()


def test_encode_is_scaled_to_three_and_back_under_load(service: Pods, render: Render) -> None:
    with Load(service) as load:
        for replicas in (1, 3, 1):
            service.apply(manifests(render, f"roles.E.replicas={replicas}", "roles.PD.replicas=2"))
            service.wait_until_ready()
            assert len(service.of("e")) == replicas
    load.check()


def test_a_process_that_stands_still_is_restarted_by_its_liveness_probe(service: Pods) -> None:
    pod = service.of("e")[0]
    before = pod.process
    before.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while not (pod.restarts == 1 and pod.ready):
        assert time.monotonic() < deadline, pod.log
        time.sleep(0.2)
    assert pod.exit_codes == [-signal.SIGKILL]
    service.wait_until_ready()


def test_frontends_serve_https(render: Render, cache: Path, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "DNS:chat.example.com")
    with pods(tmp_path, cache) as network:
        network.secrets |= {"tls.crt": cert.read_text(), "tls.key": key.read_text()}
        network.apply(read(render(DEMO, "frontend.replicas=1", 'fabric="nixl"', 'tls.existing="certificate"')))
        network.wait_until_ready()
        network.client.enter()
        (url,) = network.endpoints()
        trust = ssl.create_default_context(cafile=cert)
        name = {"sni_hostname": "chat.example.com"}
        with httpx.Client(verify=trust, trust_env=False, timeout=20) as client:
            assert client.get(f"{url}/v1/models", extensions=name).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), trust_env=False)


def test_an_upgrade_of_the_chart_fails_no_request(service: Pods, render: Render, tmp_path: Path) -> None:
    newer = tmp_path / "triptych"
    shutil.copytree(CHART, newer)
    chart = newer / "Chart.yaml"
    chart.write_text(chart.read_text().replace("ersion: 0.1.0", "ersion: 0.2.0"))
    old = {pod.name: pod for pod in service.running.values()}
    with Load(service) as load:
        service.apply(manifests(render, chart=newer))
        service.wait_until_ready()
    load.check()
    assert all(pod.container["image"].endswith(":0.2.0") for pod in service.running.values())
    assert not set(old.values()) & set(service.running.values())
    assert {code for pod in old.values() for code in pod.exit_codes[-1:]} == {0}
