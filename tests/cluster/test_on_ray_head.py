"""``triptych serve --on ray`` when the cluster's head is lost."""

from pathlib import Path

import httpx
import pytest

from tests.support.commands import FAST, picture_answer, triptych
from tests.support.on_ray import NODE, pid_of
from tests.support.processes import is_gone
from tests.support.ray_cluster import ray_cluster

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

NODES_END = 60.0
"""Seconds after which nodes without a head have ended."""


@pytest.mark.slow
def test_without_the_head_requests_are_answered_until_the_nodes_end(folder: Path) -> None:
    with (
        ray_cluster([NODE, NODE]) as cluster,
        triptych("serve", folder, "--on", f"ray://{cluster.address}", *FAST) as service,
    ):
        url = service.wait_until_ready()
        answer, instances = picture_answer(url, "tiny"), [pid_of(service, name) for name in ("e0", "pd0")]
        cluster.kill_head()
        assert picture_answer(url, "tiny") == answer
        assert all(is_gone(pid, NODES_END) for pid in instances), "nodes end without their head"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert "Traceback" not in service.text
