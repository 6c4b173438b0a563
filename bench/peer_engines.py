"""Engines that ``bench/peers.py`` compares: their commands, each at its best settings on CPUs, their processes, and
the files that they need.

A peer that can't be prepared raises ``MissingPeer``; one that doesn't start raises ``NotStarted``.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
import torch

from bench.language_limits import weight_bytes_read
from bench.serve import Load
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import read_folder
from triptych.config import EngineConfig
from triptych.errors import TriptychError
from triptych.layers.devices import weight_format
from triptych.layers.linear import WeightFormat

ROOT = Path(__file__).parents[1]
MODEL = "m"
END_TIMEOUT = 30.0
TOKENS_PER_SEQUENCE = 2048
"""Context of each sequence in llama.cpp, which divides its cache evenly."""
MAX_LINE = 200

KV_CACHE_GIB = 2
"""vLLM's KV cache: more than the largest load needs."""


class MissingPeer(Exception):
    """A peer that can't be measured here, and why."""


class NotStarted(Exception):
    """A server that ended or wasn't ready in time, and its last line."""


@dataclass(frozen=True)
class Server:
    """How to start a server, and where it answers with 200 once it is ready. ``{port}`` in an argument is its port."""

    command: tuple[str, ...]
    ready: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command with its variables, and with names in place of absolute paths."""
        variables = [f"{name}={value}" for name, value in self.environment.items() if name != "PYTHONPATH"]
        words = [Path(word).name if word.startswith("/") else word for word in self.command]
        return shlex.join([*variables, *words]).replace("'{port}'", "PORT")


@dataclass(frozen=True)
class Row:
    """A row of the tables: an engine with settings. ``server`` is None for transformers, which runs in a process of its
    own without HTTP."""

    engine: str
    settings: str
    weights: str
    """Format of the weights, as the engine names it; empty if it is unknown."""
    server: Server | None
    weight_bytes: int | None = None
    """Bytes of weights that a token's step reads; known of Triptych alone."""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.settings}"


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def triptych(model: Path, topology: str, flags: str, device: str = "cpu") -> Row:
    """A service of this checkout with the given flags."""
    command = [sys.executable, "-m", "triptych", "serve", str(model), "--topology", topology, "--port", "{port}"]
    command += ["--threads", str(len(cores())), "--served-model-name", MODEL, "--device", device, *shlex.split(flags)]
    server = Server(tuple(command), "/ready", {"PYTHONPATH": str(ROOT)})
    weights = _format(model, flags)
    if weights is None:
        return Row("Triptych", flags, "", server)
    return Row("Triptych", flags or "defaults", weights.linear_dtype, server, weight_bytes_read(model, weights))


def _format(model: Path, flags: str) -> WeightFormat | None:
    """Return the format that ``triptych serve`` with these flags stores weights in; None for flags that it refuses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    given = parser.parse_known_args(shlex.split(flags))[0]
    try:
        engine = EngineConfig(dtype=given.dtype, quantization=given.quantization)
        return weight_format(engine, torch.device("cpu"), read_folder(model))
    except TriptychError:
        return None


def vllm(environment: Path, model: Path, dtype: str, sequences: int) -> Row:
    """vLLM's server on all cores; by default it keeps one for everything but computing. Raises MissingPeer."""
    python = environment / "bin/python"
    if not python.exists():
        raise MissingPeer(f"there is no {python}")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "{port}"]
    command += ["--dtype", dtype, "--max-model-len", "4096", "--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += ["--limit-mm-per-prompt", '{"image":8,"video":0}', "--max-num-seqs", str(sequences)]
    command += ["--skip-mm-profiling"]  # it would encode the largest images there may be, for over ten minutes
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores()[0]}-{cores()[-1]}",
    }
    return Row("vLLM", f"--dtype {dtype}", dtype, Server(tuple(command), "/health", variables))


def llama_cpp(folder: Path, files: Path, weights: str, sequences: int) -> Row:
    """llama.cpp's server on all cores, with files that ``make_gguf`` made. Raises MissingPeer."""
    server = folder / "bin/llama-server"
    if not server.exists():
        raise MissingPeer(f"there is no {server}")
    threads = str(len(cores()))
    command = [str(server), "-m", str(gguf(files, weights))]
    if gguf(files, "mmproj").exists():
        command += ["--mmproj", str(gguf(files, "mmproj"))]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--alias", MODEL, "--jinja", "--reasoning-format", "none"]
    command += ["-t", threads, "-tb", threads, "-np", str(sequences), "-c", str(sequences * TOKENS_PER_SEQUENCE)]
    command += ["--cache-ram", "0"]  # copies of ended sequences help no later request: each has its own picture
    return Row("llama.cpp", weights, weights, Server(tuple(command), "/health"))


def transformers(dtype: str) -> Row:
    """Transformers in a process of its own; see ``bench/transformers_peer.py``."""
    return Row("Transformers", f"in process, {dtype}", dtype, None)


def gguf(files: Path, weights: str) -> Path:
    return files / f"{weights}.gguf"


async def make_gguf(folder: Path, model: Path, files: Path, formats: Sequence[str], log: Path) -> None:
    """Convert the checkpoint to the GGUF files that are missing or older than it: by ``convert`` to F16, and from that
    by ``llama-quantize``. A text model has no file for its towers. Raises MissingPeer."""
    files.mkdir(parents=True, exist_ok=True)
    made = max(path.stat().st_mtime for path in model.iterdir())
    config = load_config(model)
    towers = ["mmproj"] if "vision_config" in config else []
    # without it, the converter fails on checkpoints of Qwen3.5 that have no layers for multi-token prediction
    without = ["--no-mtp"] if config["model_type"] == "qwen3_5_text" else []
    for name in dict.fromkeys((*towers, "F16", *formats)):
        target = gguf(files, name)
        if target.exists() and target.stat().st_mtime >= made:
            continue
        partial = files / f"{name}.partial.gguf"
        command: list[str | Path]
        if name in {"mmproj", "F16"}:
            command = [folder / "convert", model, partial, *(["--mmproj"] if name == "mmproj" else without)]
        else:
            command = [folder / "bin/llama-quantize", gguf(files, "F16"), partial, name]
        await output_of(command, log)
        partial.replace(target)


async def output_of(command: Sequence[str | Path], log: Path) -> str:
    """Run a command with its output in ``log``, and return that. Raises MissingPeer."""
    words = [str(word) for word in command]
    try:
        with log.open("w") as output, _process(words, output.fileno(), {"PYTHONPATH": str(ROOT)}) as process:
            while process.poll() is None:
                await asyncio.sleep(0.05)
    except OSError as error:
        raise MissingPeer(str(error)) from None
    said = log.read_text()
    if process.returncode:
        raise MissingPeer(f"{Path(words[0]).name} ended with {process.returncode}: {last_line(said)}")
    return said


async def versions(environment: Path | None, llama_cpp_folder: Path | None, log: Path) -> dict[str, str]:
    """Versions of the engines, as far as they are there."""
    found = {name: importlib.metadata.version(name) for name in ("triptych", "torch", "transformers")}
    with suppress(MissingPeer):
        commit = await output_of(["git", "-C", ROOT, "describe", "--always", "--dirty"], log)
        found["triptych"] += f" ({commit.strip()})"
    if environment:
        code = "import importlib.metadata as m; print(m.version('vllm'), 'with torch', m.version('torch'))"
        with suppress(MissingPeer):
            found["vLLM"] = last_line(await output_of([environment / "bin/python", "-c", code], log))
    if llama_cpp_folder:
        with suppress(MissingPeer):
            said = await output_of([llama_cpp_folder / "bin/llama-server", "--version"], log)
            found["llama.cpp"] = next((line for line in said.splitlines() if line.startswith("version:")), "unknown")
    return found


def last_line(text: str) -> str:
    """Return the last line that isn't blank, cut to ``MAX_LINE`` characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_LINE] if lines else "no output"


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, without what would limit or redirect another engine."""
    kept = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "PYTHONPATH"}}
    return kept | {"HF_HUB_OFFLINE": "1"} | dict(more)


@dataclass(frozen=True)
class Started:
    """A server that is ready."""

    url: str
    pid: int

    @property
    def peak_mib(self) -> float:
        """The sum of the largest resident sets that its processes have had. Memory that they share counts for each."""
        return peak_mib(self.pid)

    @property
    def cpu_seconds(self) -> float:
        """The processor time that its processes have taken. Threads that wait actively take some."""
        seconds = 0.0
        for one in [psutil.Process(self.pid), *_descendants(self.pid)]:
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                seconds += times.user + times.system
        return seconds


@asynccontextmanager
async def running(server: Server, port: int, log: Path, limit: float) -> AsyncIterator[Started]:
    """Run a server with its output in ``log``. Yields it once it is ready; raises NotStarted if that takes more than
    ``limit`` seconds."""
    command = [word.replace("{port}", str(port)) for word in server.command]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output, _process(command, output.fileno(), server.environment) as process:
        deadline = time.monotonic() + limit
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while not await _answers(client, server.ready):
                if process.poll() is not None:
                    raise NotStarted(f"it ended with {process.returncode}: {last_line(log.read_text())}")
                if time.monotonic() > deadline:
                    raise NotStarted(f"it wasn't ready within {limit:g} s: {last_line(log.read_text())}")
                await asyncio.sleep(0.1)
        yield Started(url, process.pid)


class InProcess:
    """Transformers in a process that answers one request after the other; see ``bench/transformers_peer.py``."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process, self._log = process, log

    async def answer(self, seed: int) -> dict[str, float]:
        """Return the figures of the request with this seed. Raises NotStarted if the process ends before."""
        requests = self._process.stdin
        assert requests is not None
        with suppress(BrokenPipeError):
            requests.write(f"{seed}\n".encode())
            requests.flush()
        return await self.line()

    async def line(self) -> dict[str, float]:
        """Return the next line that it says."""
        answers = self._process.stdout
        assert answers is not None
        line = await asyncio.to_thread(answers.readline)
        if not line:
            raise NotStarted(f"it ended: {last_line(self._log.read_text())}")
        found: dict[str, float] = json.loads(line)
        return found

    @property
    def peak_mib(self) -> float:
        """The largest resident set that it has had."""
        return peak_mib(self._process.pid)


@asynccontextmanager
async def in_process(model: Path, dtype: str, load: Load, log: Path, device: str = "cpu") -> AsyncIterator[InProcess]:
    """Run transformers with its messages in ``log``. Yields it once it is ready; raises NotStarted."""
    command = [sys.executable, "-m", "bench.transformers_peer", str(model), "--threads", str(len(cores()))]
    command += ["--dtype", dtype, "--device", device, "--load", json.dumps(asdict(load))]
    with (
        log.open("w") as output,
        _process(command, subprocess.PIPE, {"PYTHONPATH": str(ROOT)}, output.fileno(), subprocess.PIPE) as process,
    ):
        peer = InProcess(process, log)
        await peer.line()
        yield peer


def peak_mib(pid: int) -> float:
    """Return the sum of the largest resident sets that a process and those that it started have had, in MiB."""
    peak = 0
    for one in [pid, *(child.pid for child in _descendants(pid))]:
        with suppress(OSError):  # it has just ended
            status = Path(f"/proc/{one}/status").read_text()
            peak += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return round(peak / 1024, 1)


async def _answers(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@contextmanager
def _process(
    command: Sequence[str],
    output: int,
    environment: Mapping[str, str],
    errors: int = subprocess.STDOUT,
    requests: int = subprocess.DEVNULL,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that ends, with all that it started, at the end of the block. The numbers are those of its
    standard output, error and input, as ``Popen`` takes them."""
    process = subprocess.Popen(
        command,
        stdin=requests,
        stdout=output,
        stderr=errors,
        env=_environment(environment),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        started = _descendants(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's workers outlive it at times
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found
