"""The commands of docs/deploy/vllm.md, and of the README for it, as a reader pastes them: ``scripts/test-vllm``."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import ROOT, Command, running
from tests.support.doc_examples import free_port
from tests.support.ec_vllm import MODEL, STARTING, VARIABLE, variables_of_vllm
from tests.support.serving import CHAT, image, image_part, text_part, wait_for
from tests.support.vllm_checkpoints import SHAPES
from triptych.api.gateway import GATEWAY_ONLY

ENVIRONMENT = Path(os.environ.get(VARIABLE, ""))
needs_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no environment with vLLM"),
]
PAGE = (ROOT / "docs/deploy/vllm.md").read_text()
README = (ROOT / "README.md").read_text()
PORTS = ("8000", "8001", "7010")
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?=vllm |triptych )", re.MULTILINE)


def walks(page: str) -> list[list[str]]:
    """The commands of each block that starts vLLM."""
    blocks = [block for block in _BLOCK.findall(page) if re.search("^vllm serve", block, re.MULTILINE)]
    return [[one for one in _COMMAND.split(block) if one.strip()] for block in blocks]


def test_the_pages_show_both_ways_and_the_readme_the_shorter_one() -> None:
    both = walks(PAGE)
    assert [sorted(command.split()[0] for command in block) for block in both] == [["triptych", "vllm"]] * 2
    assert [any("--engine vllm-ec=" in command for command in block) for block in both] == [False, True]
    ((*_, last),) = walks(README)
    assert last.strip() == both[0][-1].strip()
    (place,) = (number for number, line in enumerate(README.splitlines()) if line.startswith("vllm serve"))
    assert "docs/deploy/vllm.md" in "\n".join(README.splitlines()[place - 4 : place])
    assert sorted(refused_fields()) == sorted(GATEWAY_ONLY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPES["qwen2.5-vl"](tmp_path_factory.mktemp("checkpoint") / MODEL)


def started(command: str, names: Mapping[str, str], folder: Path, stack: ExitStack) -> Command:
    """Run a command as it stands, but for its model, its ports and what is between them."""
    for name, value in names.items():
        command = re.sub(rf"\b{name}\b", value, command)
    path = os.pathsep.join((str(ENVIRONMENT / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {**variables_of_vllm(folder), "PATH": path, "HOME": str(folder), "TRIPTYCH_PORT": names["8000"]}
    return stack.enter_context(running(["bash", "-euo", "pipefail", "-c", command], folder, variables))


def answers(url: str, seconds: float) -> None:
    def ready() -> bool:
        try:
            return httpx.get(url, trust_env=False, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(ready, seconds)


def ask(port: str, model: str, **fields: Any) -> httpx.Response:
    content = [image_part(image(200, 160, 3)), text_part("What is it?")]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    url = f"http://127.0.0.1:{port}{CHAT}"
    return httpx.post(url, json={**body, "ignore_eos": True, **fields}, trust_env=False, timeout=300)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def refused_fields() -> Iterator[str]:
    (sentence,) = re.findall(r"^Refused with a 400 that names the field: (.*)$", PAGE, re.MULTILINE)
    yield from re.findall(r"`(\w+)`", sentence)


class TestWalks:
    pytestmark = needs_vllm

    @pytest.mark.parametrize("number", range(2))
    def test_a_walk_works_as_pasted(self, number: int, folder: Path, tmp_path: Path) -> None:
        """Whether answers are right is for other tests: vLLM computes in 16 bits unless it is told otherwise."""
        ports = dict(zip(PORTS, (str(free_port()) for _ in PORTS), strict=True))
        names = {"MODEL": str(folder), "NAME": "shown", **ports}
        with ExitStack() as stack:
            for command in walks(PAGE)[number]:
                started(command, names, tmp_path, stack)
            answers(f"http://127.0.0.1:{names['8001']}/health", STARTING)
            answers(f"http://127.0.0.1:{names['8000']}/ready", 120)
            assert text_of(ask(names["8000"], "shown"))
            for field in refused_fields():
                response = ask(names["8000"], "shown", **{field: {"x": "y"}})
                assert (response.status_code, response.json()["error"]["param"]) == (400, field)
