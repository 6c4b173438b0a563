"""A Ray cluster on this machine: its processes belong to one that is run as ``python -m tests.support.ray_cluster``, so
that nothing of it is left when a test ends."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from tests.support.commands import ROOT

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
SETTINGS = HEALTH_CHECKS | {"gcs_rpc_server_reconnect_timeout_s": 10}
"""With the seconds after which nodes end by themselves without their head; 60 by default."""
MEMORY = 80_000_000
"""Bytes of a node's object store, the least that Ray allows: nothing is in it."""


@dataclass
class RayCluster:
    """A head without CPUs, and nodes. ``raylets`` are the process ids of the nodes' raylets."""

    address: str
    raylets: list[int]
    head: list[int]
    """Process ids of the head, its control store among them."""

    def raylet_of(self, pid: int) -> int:
        """The raylet whose node a process is on."""
        return next(parent.pid for parent in psutil.Process(pid).parents() if parent.pid in self.raylets)

    def kill_head(self) -> None:
        """Kill the head's processes at once; the nodes stay."""
        for pid in self.head:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def kill_node(self, raylet: int) -> None:
        """Kill all of a node's processes at once, as if its machine had lost power."""
        process = psutil.Process(raylet)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


@contextmanager
def ray_cluster(nodes: Sequence[dict[str, float]]) -> Iterator[RayCluster]:
    """A cluster with a node for each dictionary of resources. No process of it survives."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets' paths must be short
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster", json.dumps(list(nodes))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    family: set[psutil.Process] = set()
    try:
        started = next(line for line in process.stdout if line.startswith("{"))
        family.update(psutil.Process(process.pid).children(recursive=True))
        yield RayCluster(**json.loads(started))
    finally:
        with suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(process.pid).children(recursive=True))
        for one in [*family, psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()
        _, left = psutil.wait_procs(family, 10)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, left


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster
    head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False, "_system_config": SETTINGS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    raylets = []
    for resources in json.loads(sys.argv[1]):
        cpus, gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        given = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources}
        node = cluster.add_node(**given, object_store_memory=MEMORY, wait=False)
        raylets += [info.process.pid for info in node.all_processes["raylet"]]
    cluster.wait_for_nodes()
    ours = [info.process.pid for infos in cluster.head_node.all_processes.values() for info in infos]
    print(json.dumps({"address": cluster.address, "raylets": raylets, "head": ours}), flush=True)
    sys.stdin.read()  # ends with the test, also with one that is killed
    cluster.shutdown()


if __name__ == "__main__":
    main()
