"""A service as service managers and clusters confine it: each question is asked of a real one."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.commands import ROOT

NEEDED = ("setpriv", "unshare")
START = 120.0
UID = 12345

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDED)), reason=f"needs root, and {' and '.join(NEEDED)}"
)


def namespace(writable: Path) -> str:
    """Commands for a mount namespace: a read-only root file system, but for ``writable`` at ``/mnt`` and ``/tmp``. The
    interpreter is readable, as if it were installed for all users."""
    lines = [f"mount --bind {writable} /mnt", "mount -t tmpfs -o mode=1777 tmpfs /tmp"]
    python = Path(sys.base_prefix)
    hidden = [path for path in python.parents if not path.stat().st_mode & 0o001]
    lines += ["mkdir /tmp/.python", f"mount --bind {python} /tmp/.python"] if hidden else []
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {path}" for path in hidden[-1:]]
    lines += [f"mkdir -p {python}", f"mount --bind /tmp/.python {python}"] if hidden else []
    return "\n".join([*lines, "mount -o remount,bind,ro /", "cd /", 'exec "$@"'])


@contextmanager
def confined(
    user: Sequence[str], variables: Mapping[str, str], writable: Path, arguments: Sequence[str]
) -> Iterator[str]:
    """The URL of a service with a root file system that is read-only but for a folder and an empty ``/tmp``."""
    words = [*("setpriv", *user, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"), sys.executable, "-m"]
    words += ["triptych", "serve", "demo", "--topology", "1EPD", "--threads", "1", "--port", "0", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with (writable.parent / "log").open("w+b") as log:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-ec", namespace(writable), "sh", *words],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            ends = time.monotonic() + START
            while not (found := re.search(r"ready: .* on (http\S+)/v1", Path(log.name).read_text())):
                assert process.poll() is None and time.monotonic() < ends, Path(log.name).read_text()
                time.sleep(0.1)
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, Path(log.name).read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def secret_in(folder: Path, mode: int, group: int) -> Path:
    path = folder / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    os.chown(path, 0, group)
    path.chmod(mode)
    return path


USERS: Mapping[str, tuple[list[str], int, int, dict[str, str]]] = {
    # OpenShift: any user, in root's group, without a home folder
    "random user": (["--reuid", str(UID), "--regid", "0", "--clear-groups"], 0o440, 0, {}),
    # Kubernetes with fsGroup
    "fsGroup": (["--reuid", str(UID), "--regid", str(UID), "--groups", "10001"], 0o440, 10001, {"HOME": "/"}),
    # systemd: a home folder that is hidden, and a credential whose list of users shows as the group's mode
    "credential": (["--reuid", str(UID), "--regid", str(UID), "--clear-groups"], 0o440, UID, {"HOME": "/nonexistent"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_a_confined_service_answers(name: str, cache: Path, tmp_path: Path) -> None:
    user, mode, group, variables = USERS[name]
    writable = tmp_path / "state"
    shutil.copytree(cache, writable)
    for path in (writable, *writable.rglob("*")):
        os.chown(path, UID, 0)
    secret_in(writable, mode, group)
    given = {"XDG_CACHE_HOME": "/mnt", **variables}
    with confined(user, given, writable, ["--cluster-secret-file", "/mnt/secret"]) as url:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 1), answer.text
