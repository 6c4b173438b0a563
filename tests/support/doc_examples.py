"""The code blocks of the documents, and how each is run: nothing is known of a block but its text."""

import contextlib
import random
import re
import shlex
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.newcomer.conftest import Environment
from tests.support.certificates import make_certificate
from tests.support.checkpoints import make_checkpoint
from tests.support.commands import ROOT, running
from tests.support.serving import image, image_part, text_part

DOCUMENTS = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
NOT_RUN = {
    "./scripts/demo": "the checkout's own, which makes .venv there",
    "./scripts/test": "the checkout's own, which makes .venv there",
    "python -m pytest tests/gpu": "needs a GPU, and the checkout's tests and benchmarks",
    "python -m bench": "needs a GPU, and the checkout's benchmarks",
    "# on a machine with": "needs GPUs; tests/gpu runs services on them",
    "export ANTHROPIC": "a part of another program's configuration",
    'model = "demo"': "a part of another program's configuration",
    "triptych serve MODEL --role frontend --control-port 8001 --cluster-host": "the same port of two machines",
    "scripts/setup-peers": "builds llama.cpp and downloads vLLM; tests/test_peers.py runs the comparison without them",
    "# two random images of": "needs vLLM; scripts/compat runs it, where it is installed",
    "python3 -m venv": "in a checkout; the wheel that is installed here is made of it",
    "pip wheel": "in a checkout, as above",
    ">>> /image": "no command: what is typed into a chat",
    "triptych top": "for services elsewhere, and jq; tests/cli runs it",
    "triptych pull": "needs the Hub; tests/test_hub.py has a server of its kind",
    "vllm serve": "needs vLLM; tests/integrations/test_walk_through.py runs it, and coming-from-vllm.md compares",
    "# prometheus.yml": "a part of another program's configuration",
}
"""How blocks begin that aren't run, and why."""
SERVICES = {" d1=P": "1P2D", "pd0=P": "2PD", "--control": "1E1PD"}
"""The topology of the service that the commands of a block with these words talk to; the first that fits."""
SLOW = {"triptych bench": ("--quick",), "triptych chaos": ("--only", "kill-e", "--requests", "8")}
"""How commands begin that take long, and what makes them shorter."""
SHELL = ("head", "chmod", "curl")
"""Commands that come with any system."""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"the block of {self.document} that begins with {self.text.splitlines()[0]!r}"

    @property
    def lines(self) -> list[str]:
        """Its commands, each in one line."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]


def blocks(document: str) -> Iterator[Block]:
    """All that are run: a block that isn't has to be named in ``NOT_RUN``."""
    for match in _BLOCK.finditer((ROOT / document).read_text()):
        block = Block(document, match[2], match[3])
        if not block.text.startswith(tuple(NOT_RUN)):
            yield block


def free_port() -> int:
    """One that stays free until a service takes it: the kernel assigns it only to those that ask for it by number, as
    it may those that it chooses itself."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10_000, 65_536) if not first <= port <= last]
    for port in random.sample(others, len(others)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port is taken")


class Reader:
    """A reader who runs the examples of one document, one after the other, in one folder."""

    def __init__(self, environment: Environment, folder: Path, *, patient: bool) -> None:
        self._environment = environment
        self._folder = folder
        self._patient = patient
        self._services = ExitStack()
        """Those that the block's later commands talk to."""
        self.ran: list[str] = []
        # two ranks can't share the three kv heads of the demo's
        self._divisible = make_checkpoint(folder / "divisible")
        (folder / "picture.png").write_bytes(image())

    def run(self, block: Block) -> None:
        self._port, self._control = free_port(), free_port()
        with ExitStack() as self._services:
            if block.language == "python":
                self._serve("triptych serve demo --topology 1EPD", block, stays=True)
                (self._folder / "example.py").write_text(self._with_values(block.text))
                said = self._complete("python example.py", block)
                assert said.strip(), f"{block} prints nothing"
            elif block.language == "toml":
                name, command = re.match(r"# (\S+): (.*)\n", block.text).groups()  # type: ignore[union-attr]
                (self._folder / name).write_text(self._with_values(block.text))
                self._line(command, block)
            else:
                for line in block.lines:
                    self._line(line, block)

    def _line(self, line: str, block: Block) -> None:
        words = shlex.split(line, comments=True)
        command = Path(words[0]).name
        if line.startswith(tuple(SLOW)) and not self._patient:
            return
        if command == "triptych" and words[1] == "serve":
            self._serve(line, block, stays="--role" in words)
        elif command == "triptych":
            if "--control" in words:
                self._service_for(block)
            if "--log" in words:
                self._log_requests(block)
            self._complete(line, block)
        else:
            assert command in SHELL, f"how is {line!r} run, in {block}?"
            self._complete(line, block)
        self.ran.append(line)

    def _serve(self, line: str, block: Block, *, stays: bool) -> None:
        """Starts a service, or a part of one, and asks it something. One that ``stays`` runs until the block ends."""
        words = shlex.split(self._with_values(line), comments=True)
        if "cert.pem" in words:
            self._certify()
        with ExitStack() as starting:
            service = starting.enter_context(
                running([str(self._environment.bin / "triptych"), *words[1:]], self._folder, self._variables)
            )
            if "--join" in words:
                service.wait_for_line(r"has this instance: ready$")
                if "PD" in words:
                    self._ask(block)
            else:
                url = service.wait_until_ready()
                if "frontend" not in words:
                    self._ask(block, url)
            if stays:
                self._services.push(starting.pop_all())
            else:
                service.process.terminate()
                assert service.end() == 0, f"{line!r} in {block}:\n{service.text}"

    def _service_for(self, block: Block) -> None:
        """What a command talks to that the document takes for granted."""
        if self._is_served():
            return
        topology = next(topology for words, topology in SERVICES.items() if words in block.text)
        self._serve(f"triptych serve demo --topology {topology} --control-port 8001", block, stays=True)

    def _log_requests(self, block: Block) -> None:
        command = "triptych serve demo --topology 1EPD --port 0 --enable-log-requests"
        self._serve(f"{command} --request-log-file requests.jsonl", block, stays=False)

    def _complete(self, line: str, block: Block) -> str:
        words = [*shlex.split(self._with_values(line), comments=True)]
        words += next((shorter for slow, shorter in SLOW.items() if line.startswith(slow)), ())
        shell = self._with_values(line) if words[0] in SHELL else shlex.join([Path(words[0]).name, *words[1:]])
        with running(["bash", "-euo", "pipefail", "-c", shell], self._folder, self._variables) as command:
            assert command.end(180) == 0, f"{line!r} in {block}:\n{command.text}"
            assert "Traceback" not in command.text
            return command.text

    def _ask(self, block: Block, url: str = "") -> None:
        keys = self._folder / "keys"
        headers = {"Authorization": f"Bearer {keys.read_text().strip()}"} if keys.exists() else {}
        url = (url or f"http://127.0.0.1:{self._port}").replace("0.0.0.0", "127.0.0.1")
        certificate = self._folder / "cert.pem"
        trust = ssl.create_default_context(cafile=certificate) if certificate.exists() else True
        with httpx.Client(base_url=url, verify=trust, trust_env=False, timeout=60, headers=headers) as client:
            (model,) = client.get("/v1/models").json()["data"]
            parts = [text_part("What is it?")]
            parts += [image_part()] if "image" in model["input_modalities"] else []
            body = {"model": model["id"], "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, f"{block}: {answer.text}"

    def _certify(self) -> None:
        make_certificate(self._folder, "IP:127.0.0.1")

    def _is_served(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._control)) == 0

    @property
    def _variables(self) -> Mapping[str, str]:
        return self._environment.variables | {"TRIPTYCH_PORT": str(self._port)}

    def _with_values(self, text: str) -> str:
        """Placeholders, and what belongs to other machines, as they are here."""
        control = f"127.0.0.1:{self._control}"
        for placeholder, value in {
            r"\bMODEL\b(?=.*--tensor-parallel-size)": str(self._divisible),
            r"\bMODEL\b": "demo",
            r"/models/[\w.-]+": "demo",
            r"\bHOST:PORT\b": control,
            r"--control …": f"--control {control}",
            r"\b10\.0\.0\.\d+\b": "127.0.0.1",
            r"\b8001\b": str(self._control),
            r"\b8000\b": str(self._port),
            r"/var/log/triptych/": "",
            r"\b8GiB\b": "256MiB",
        }.items():
            text = re.sub(placeholder, value, text)
        return text
