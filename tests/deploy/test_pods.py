"""The chart's pods, run as processes in network namespaces: started, deleted under load, scaled and upgraded."""

import json
import re
import shutil
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.kubernetes_manifests import CHART, ROOT
from tests.support.certificates import make_certificate
from tests.support.manifests import Document, read
from tests.support.network_policies import NFT
from tests.support.pod_load import Load
from tests.support.pods import Pods, on, pods

pytestmark = pytest.mark.slow

DEMO = CHART.parent / "examples" / "demo.yaml"
SETTINGS = (
    "frontend.replicas=3",
    "drainSeconds=30",
    'fabric="nixl"',  # pods share no memory, but these processes could
    'roles.E.args=["--dtype","float32"]',
    'roles.PD.args=["--dtype","float32"]',
)
KEY = "key-of-the-clients-0123456789"
Render = Callable[..., str]


@pytest.fixture(scope="module")
def service(render: Render, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("pods"), cache) as network:
        network.apply(manifests(render))
        network.wait_until_ready()
        yield network


def manifests(render: Render, *settings: str, chart: Path = CHART) -> list[Document]:
    return read(render(DEMO, *SETTINGS, *settings, chart=chart))


def test_the_pods_get_ready_by_their_probes_and_answer(service: Pods) -> None:
    assert len(service.of("frontend")) == 3
    assert len(service.endpoints()) == 3
    with Load(service) as load:
        time.sleep(10)
    load.check()
    for pod in service.running.values():
        assert stat.S_IMODE((pod.path("secrets") / "secret").stat().st_mode) == 0o440
        assert pod.restarts == 0, pod.log
    assert any(" joined as E" in pod.log for pod in service.of("frontend"))


@pytest.mark.skipif(not NFT, reason="no network policies without nft: apt-get install nftables")
def test_the_policies_let_strangers_reach_the_port_for_clients_alone(service: Pods) -> None:
    """All other tests show that the policies keep no pod from what it needs."""
    frontends = {pod.name: {8000} for pod in service.of("frontend")}
    assert {name: ports for name, ports in service.reached(service.client).items() if ports} == frontends
    among_pods = service.reached(service.of("frontend")[0].host)
    assert all(among_pods[pod.name] >= {8000, 8001} for pod in service.of("frontend"))
    assert all(len(among_pods[pod.name]) >= 2 for pod in (*service.of("e"), *service.of("pd")))  # the fabric's, too
    with on(service.client, lambda: socket.create_server((service.client.address, 0))) as server:

        def connect() -> None:
            socket.create_connection(server.getsockname(), 2).close()

        on(service.of("frontend")[0].host, connect)  # they fetch media
        with pytest.raises(OSError):
            on(service.of("e")[0].host, connect)


def test_queries_of_autoscalers_find_what_frontends_export(service: Pods, render: Render) -> None:
    urls = service.endpoints()
    exported = on(service.client, lambda: "".join(httpx.get(f"{url}/metrics", trust_env=False).text for url in urls))
    samples = [one for family in text_string_to_metric_families(exported) for one in family.samples]
    scaled = [one for one in read(render(DEMO.with_name("autoscaling.yaml"))) if one["kind"] == "ScaledObject"]
    queries = [trigger["metadata"]["query"] for one in scaled for trigger in one["spec"]["triggers"]]
    asked = [one for query in queries for one in re.findall(r"(triptych:\w+)\{([^}]*)\}", query)]
    assert len(asked) >= len(queries) == 4
    for name, selector in asked:
        # of the others, Prometheus makes the labels
        labels = set(re.findall(r'(instance_name|stage|role)="([^"]*)"', selector))
        assert any(one.name == name and labels <= set(one.labels.items()) for one in samples), (name, selector)


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
    pod.signal(signal.SIGSTOP)
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


def test_the_example_with_encode_on_processors_answers(render: Render, cache: Path, tmp_path: Path) -> None:
    """But for accelerators, threads and the model in the volume, everything is as in the example."""
    settings = ['fabric="nixl"', "frontend.replicas=1", "roles.E.replicas=2", "roles.E.threads=1"]
    settings += ["roles.PD.replicas=1", "roles.PD.threads=1", "roles.PD.gpus=0", 'roles.PD.kvCacheMemory="256MiB"']
    documents = read(render(DEMO.with_name("e-on-cpu.yaml"), *settings, 'model.servedName="demo"'))
    shutil.copytree(ROOT / "triptych" / "demo" / "model", tmp_path / "models" / "Qwen3-VL-8B-Instruct")
    with pods(tmp_path, cache) as network:
        network.claims["models"] = tmp_path / "models"
        network.apply(documents)
        network.wait_until_ready()
        with Load(network) as load:
            time.sleep(5)
    load.check()


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


def test_prefill_and_decode_in_pods_of_their_own_behind_api_keys(render: Render, cache: Path, tmp_path: Path) -> None:
    """As 2E1P2D. Probes and instances need no key."""
    role = {"threads": 1, "kvCacheMemory": "256MiB", "resources": {"limits": {"memory": "2Gi"}}}
    roles = {"E": {"replicas": 2}, "PD": None, "P": role | {"replicas": 1}, "D": role | {"replicas": 2}}
    settings = [
        'fabric="nixl"',
        "frontend.replicas=1",
        'apiKeys.existing="triptych-keys"',
        f"roles={json.dumps(roles)}",
    ]
    with pods(tmp_path, cache) as network:
        network.secrets["keys"] = f"{KEY}\nkey-of-others-0123456789\n"
        network.apply(read(render(DEMO, *settings)))
        network.wait_until_ready()
        assert [len(network.of(role)) for role in ("e", "p", "d", "pd")] == [2, 1, 2, 0]
        with Load(network, KEY) as load:
            time.sleep(5)
        load.check()
        (url,) = network.endpoints()
        replies = [on(network.client, partial(_models, url, key)) for key in ("", "no key of this service", KEY)]
        assert replies == [401, 401, 200]
        for pod in network.of("frontend"):
            assert KEY not in pod.log


def _models(url: str, key: str) -> int:
    """The status with which the list of models is answered."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, timeout=20, headers=headers) as client:
        return client.get(f"{url}/v1/models").status_code
