"""vLLM's server in an environment of its own: ``scripts/test-vllm`` names it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TRIPTYCH_TEST_VLLM"
"""Names the environment."""
MODEL = "m"
STARTING = 900.0
"""Seconds within which it must serve, on a machine that has other work."""


@dataclass
class VllmServer:
    """A server that has been started."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
        """Return the status and the decoded body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def begin(self, body: Mapping[str, Any]) -> http.client.HTTPConnection:
        """Send a request. The caller may close the connection before there is an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def vllm_server(
    environment: Path,
    checkpoint: Path,
    log: Path,
    *flags: str,
    port: int = 0,
    connector: Mapping[str, Any] | None = None,
) -> Iterator[VllmServer]:
    """Serve a checkpoint in float32. ``connector`` is its ``ec_connector_extra_config``; without it, vLLM has none, and
    none of this distribution's plugins."""
    port = port or free_port()
    command = [str(environment / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--skip-mm-profiling", *flags]
    if connector is not None:
        command += ["--ec-transfer-config", json.dumps(transfer_config(connector))]
    variables = variables_of_vllm(log.parent if connector is not None else None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **variables}, start_new_session=True
        )
    server = VllmServer(process, port, log)
    try:
        _wait(server)
        yield server
    finally:
        _end(process)


def variables_of_vllm(installed: Path | None) -> dict[str, str]:
    """Return what vLLM's environment needs here. It finds this distribution as if it were installed, by way of the
    folder ``installed``; with None it doesn't."""
    path = [] if installed is None else [str(ROOT), str(ROOT / "integrations/vllm"), _entry_points(installed)]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def transfer_config(connector: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": "triptych_vllm.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": dict(connector),
    }


def _entry_points(folder: Path) -> str:
    """Return a folder on whose path vLLM finds the plugin, as an installed distribution has it."""
    made = folder / "installed"
    metadata = made / "triptych_vllm-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: triptych-vllm\nVersion: 0\n")
    plugins = "[vllm.general_plugins]\ntriptych_deepstack = triptych_vllm.deepstack:register\n"
    (metadata / "entry_points.txt").write_text(plugins)
    return str(made)


def _wait(server: VllmServer) -> None:
    deadline = time.monotonic() + STARTING
    while not server.is_healthy():
        ended = server.process.poll() is not None
        if ended or time.monotonic() > deadline:
            last = server.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"vLLM {'ended' if ended else 'does not serve'}:\n{last}")
        time.sleep(0.3)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
