"""The processes of a service, found in ``/proc``: those with a name, what these started, and all others."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import wait_for
from triptych.measure.load.processes import descendants, named_children

# a fork server with an instance, whose title is one word, and a frontend; both have a process of their own
TITLE = "python -P -m triptych.server.instance_main --name e0"
FORK_SERVER = '(exec -a "$TITLE" bash -c "sleep 60 & wait") & wait'
SUPERVISOR = 'bash -c "$FORK_SERVER" & bash -c "sleep 60 & wait" bash --name frontend & wait'


@pytest.fixture
def supervisor() -> Iterator[int]:
    variables = os.environ | {"TITLE": TITLE, "FORK_SERVER": FORK_SERVER}
    with subprocess.Popen(["bash", "-c", SUPERVISOR], env=variables, start_new_session=True) as process:
        try:
            wait_for(lambda: [command(pid) for pid in descendants(process.pid)].count("sleep") == 2)
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_each_process_is_counted_once(supervisor: int) -> None:
    named = named_children(supervisor)
    assert set(named) == {"frontend", "e0"}
    [fork_server] = descendants(supervisor, without=named.values())
    assert named["e0"] in descendants(fork_server)
    below = [one for pid in named.values() for one in descendants(pid)]
    assert sorted([fork_server, *named.values(), *below]) == sorted(descendants(supervisor))
    assert [command(pid) for pid in below] == ["sleep", "sleep"]
