"""Long prompts, in as much memory as was predicted."""

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import DENSE, make_checkpoint
from tests.support.commands import Command, triptych

CONTEXT = 32768
SMALL = ("--port", "0", "--kv-cache-memory", "1MiB")
UNITS = {"MiB": 2**20, "GiB": 2**30}
ROUNDING = 0.01 * 2**30
"""The log gives amounts of memory to a hundredth of a GiB."""


def predicted(service: Command, what: str) -> float:
    """Bytes that the log names."""
    found = service.wait_for_line(rf"{what} ([\d.]+) (MiB|GiB)", 1.0)
    return float(found[1]) * UNITS[found[2]]


def resident(service: Command, name: str, field: str) -> int:
    """Bytes that a process has in memory (field "VmRSS"), or had at most ("VmHWM")."""
    status = Path(f"/proc/{service.child(name).pid}/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match
    return int(match[1]) * 1024


def ask(url: str, num_characters: int) -> httpx.Response:
    body = {"model": "long", "messages": [{"role": "user", "content": "x" * num_characters}], "max_tokens": 2}
    return httpx.post(f"{url}/v1/chat/completions", json=body | {"ignore_eos": True}, trust_env=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_prompt_of_32k_tokens_takes_the_estimated_memory(tmp_path: Path, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "long", sizes=replace(DENSE, context=CONTEXT, layers=2, heads=2, kv_heads=1))
    settings = ("--dtype", dtype, "--kv-cache-tokens", str(CONTEXT), "--max-num-seqs", "4", "--port", "0")
    with triptych("serve", folder, "--topology", "1EPD", "--threads", "1", *settings) as service:
        url = service.wait_until_ready()
        limit = predicted(service, "at most") - predicted(service, "memory:") + ROUNDING
        kv_cache = predicted(service, r"pages,")
        before = resident(service, "epd0", "VmRSS")
        response = ask(url, CONTEXT - 200)
        assert response.status_code == 200, response.text
        assert CONTEXT - 200 <= response.json()["usage"]["prompt_tokens"] <= CONTEXT
        grown = resident(service, "epd0", "VmHWM") - before
        # Memory that the start gave back may be used again, so that less is new than the KV cache holds.
        assert kv_cache / 2 < grown < limit
        assert ask(url, CONTEXT).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            ["--max-model-len", "4096", "--kv-cache-memory", "1MiB"],
            ["--max-model-len 4096", "--kv-cache-memory 1MiB", "2,048"],
        ),
        pytest.param(
            ["--kv-cache-memory", "900TiB", "--max-num-seqs", "1000000000"],
            ["--kv-cache-memory 900TiB", "are free"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["--kv-cache-memory", "1KB"], ["--kv-cache-memory 1KB", "a page of 16"], marks=pytest.mark.slow),
    ],
)
def test_a_kv_cache_that_does_not_fit_is_refused_at_start(folder: Path, settings: list[str], named: list[str]) -> None:
    with triptych("serve", folder, "--topology", "1PD", "--port", "0", *settings) as service:
        assert service.end(60) == 1
        for words in named:
            assert words in service.text


@pytest.mark.slow
def test_the_context_is_what_the_kv_cache_holds(folder: Path) -> None:
    with triptych("serve", folder, "--topology", "1EPD", "--served-model-name", "long", *SMALL) as service:
        url = service.wait_until_ready()
        (model,) = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert model["max_model_len"] == 2048, "in fp16"
        assert ask(url, 2100).json()["error"]["code"] == "context_length_exceeded"
