"""An encode instance on one host, frontend and language instance on another: real processes in network namespaces."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.commands import Command, triptych
from tests.support.namespaces import Host, two_hosts
from tests.support.serving import image, image_part, served, text_part
from triptych.transfer.fabrics.opening import is_installed

FAST = ("--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "2048")
ASK = """
import sys, urllib.request
headers = {"content-type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", sys.stdin.buffer.read(), headers)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""
CONTENT = [image_part(image(256, 256, 1)), text_part("What is it?")]
BODY = {"model": "tiny", "messages": [{"role": "user", "content": CONTENT}], "max_tokens": 8, "ignore_eos": True}
ROW_BYTES = 64 * (64 + 2 * 64) * 4
"""Of the picture: 64 rows of 64 columns, and two more of deepstack features, in fp32."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def answer(folder: Path) -> str:
    """From one process, without any transfer."""
    with served(folder, "1EPD") as service:
        return service.text(CONTENT)


def secret_in(path: Path) -> str:
    path.touch(0o600)
    path.write_text(secrets.token_hex())
    return str(path)


def ask(host: Host, url: str) -> str:
    reply = json.loads(host.run([sys.executable, "-c", ASK, url], stdin=json.dumps(BODY)))
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fabric", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("nixl", "mooncake")), "auto"]
)
def test_rows_travel_from_host_to_host(
    fabric: str, hosts: tuple[Host, Host], folder: Path, tmp_path: Path, answer: str
) -> None:
    if not any(map(is_installed, [fabric] if fabric != "auto" else ["nixl", "mooncake"])):
        pytest.skip(f"nothing for --fabric {fabric} is installed: pip install '.[nixl,mooncake]' in a checkout")
    here, there = hosts
    secret = ("--cluster-secret-file", secret_in(tmp_path / "secret"))
    door_flags = ("--role", "frontend", "--port", "0", "--control-port", "8001", *secret)
    join = (*FAST, *secret, "--fabric", fabric, "--join", f"{here.address}:8001")

    def serve(host: Host, *flags: str) -> AbstractContextManager[Command]:
        return triptych("serve", folder, *flags, "--cluster-host", host.address, prefix=host.prefix)

    with (
        serve(here, *door_flags) as door,
        serve(here, "--role", "PD", *join),
        serve(there, "--role", "E", *join),
    ):
        url = door.wait_until_ready()
        door.wait_for_line("joined as PD")
        door.wait_for_line("joined as E")
        sent_before = there.num_sent()
        assert ask(here, url) == answer
        assert there.num_sent() - sent_before >= ROW_BYTES


@pytest.mark.slow
def test_an_instance_without_the_secret_is_rejected_and_logs_likely_causes(folder: Path, tmp_path: Path) -> None:
    ours, theirs = (("--cluster-secret-file", secret_in(tmp_path / name)) for name in ("ours", "theirs"))
    with triptych("serve", folder, "--role", "frontend", "--port", "0", *ours) as door:
        door.wait_until_ready()
        address = door.wait_for_line(r"--join (\S+)")[1]
        join = ("serve", folder, *FAST, "--role", "E", "--join", address, "--start-timeout", "1")
        with triptych(*join, *theirs) as stranger, triptych(*join) as innocent:
            for command in (stranger, innocent):
                assert command.end(60) == 75, command.text
                assert command.errors[-1] == (
                    f"triptych: no answer from the frontend at {address}: is it running, with the same "
                    "--cluster-secret-file?"
                )
                assert "Traceback" not in command.text
        assert "joined" not in door.text
        assert "refused" not in door.text
