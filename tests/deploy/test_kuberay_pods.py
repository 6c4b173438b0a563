"""The manifests for KubeRay, whose pods run as processes in network namespaces: Ray's head and workers with the
operator's commands, and the service that places instances on them."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import pytest

from scripts.kubernetes_manifests import ROOT
from tests.support.kuberay import head_names, head_of, workers_of
from tests.support.manifests import Document, read
from tests.support.network_policies import NFT
from tests.support.pod import Pod
from tests.support.pod_load import Load
from tests.support.pods import Pods, pods

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

NAMESPACE = "triptych"
DOCUMENTS = read((ROOT / "deploy" / "kuberay" / "demo.yaml").read_text())


@dataclass
class KubeRay:
    """The operator's part: as many pods as the RayCluster says."""

    pods: Pods
    cluster: Document

    def reconcile(self) -> None:
        """Start the pods that are missing, and wait until all are ready."""
        self.pods.policies = [one for one in DOCUMENTS if one["kind"] == "NetworkPolicy"]
        if "head" not in self.pods.running:
            self.pods.start("head", head_of(self.cluster), *head_names(self.cluster, NAMESPACE))
        for name, template in workers_of(self.cluster, NAMESPACE).items():
            if name not in self.pods.running:
                self.pods.start(name, template)
        self.pods.apply(DOCUMENTS)
        self.pods.wait_until_ready()

    @property
    def service(self) -> Pod:
        (pod,) = self.pods.of("serve")
        return pod

    def places(self) -> dict[str, str]:
        """The worker pod of each instance that is ready, as `triptych status` has it."""
        controls = re.findall(r"triptych status (--control .*)", self.service.log)
        if not controls:  # it is told once all have joined
            return {}
        status = json.loads(self.service.exec("triptych", "status", "--json", *controls[-1].split()))
        pods = {pod.host.address: name for name, pod in self.pods.running.items()}
        ready = [one for one in status["launched"] if one["role"] and one["state"] == "ready"]
        return {one["name"]: pods[one["node"]] for one in ready if one["node"] in pods}

    def wait_until_whole(self) -> dict[str, str]:
        """Wait until there are as many instances as the topology says. Return their worker pods."""
        deadline = time.monotonic() + 300
        while len(places := self.places()) < 3:
            assert time.monotonic() < deadline, self.service.log[-5000:]
            time.sleep(0.5)
        return places


@pytest.fixture(scope="module")
def ray(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeRay]:
    with pods(tmp_path_factory.mktemp("kuberay"), cache) as network:
        network.secrets["auth_token"] = token_hex(32)
        (cluster,) = [one for one in DOCUMENTS if one["kind"] == "RayCluster"]
        operator = KubeRay(network, cluster)
        operator.reconcile()
        yield operator


def test_the_pods_get_ready_by_their_probes_and_answer(ray: KubeRay) -> None:
    assert len(ray.pods.running) == 7
    with Load(ray.pods) as load:
        time.sleep(10)
    load.check()
    assert {name: pod.restarts for name, pod in ray.pods.running.items() if pod.restarts} == {}
    kinds = {name: pod.partition("-")[0] for name, pod in ray.wait_until_whole().items()}
    assert kinds == {"e0": "encode", "e1": "encode", "pd0": "decode"}


@pytest.mark.skipif(not NFT, reason="no network policies without nft: apt-get install nftables")
def test_strangers_reach_the_port_for_clients_alone(ray: KubeRay) -> None:
    reached = ray.pods.reached(ray.pods.client)
    assert {name: ports for name, ports in reached.items() if ports} == {ray.service.name: {8000}}
    among_pods = ray.pods.reached(ray.service.host)
    assert among_pods["head"] >= {6379}
    assert all(ports >= {6380} for name, ports in among_pods.items() if name.startswith(("encode", "decode")))


@pytest.mark.parametrize("instance", ["e0", "pd0"])
def test_a_worker_that_is_deleted_under_load_loses_no_request(instance: str, ray: KubeRay) -> None:
    before = ray.wait_until_whole()
    with Load(ray.pods) as load:
        time.sleep(3)
        ray.pods.delete(before[instance])
        after = ray.wait_until_whole()  # the spare pod has the instance before the operator's new pod is there
        ray.reconcile()
        time.sleep(3)
    load.check()
    assert after[instance] != before[instance]


def test_another_service_takes_the_place_of_one_that_is_deleted(ray: KubeRay) -> None:
    pod = ray.pods.delete(ray.service.name)
    assert pod.exit_codes == [0], pod.log
    ray.reconcile()
    with Load(ray.pods) as load:
        time.sleep(5)
    load.check()
