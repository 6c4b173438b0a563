"""Load generators that others wrote work unchanged: AIPerf and GuideLLM, in an environment of their own, which
``scripts/setup-clients`` makes; vLLM's ``bench serve``, where the variable names its command."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import FLOAT32
from tests.support.scraping import scrape
from tests.support.serving import CHAT, Served, served
from triptych.demo import MODEL_DIR

LOAD = Path(__file__).parents[2] / ".venv-load" / "bin"
VLLM = os.environ.get("TRIPTYCH_TEST_VLLM", "")
NUMBER = 4


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """A service whose tokenizer transformers can load."""
    with served(MODEL_DIR, engine=replace(FLOAT32, kv_cache_tokens=8192)) as service:
        yield service


def ran(command: Path, *arguments: Any, cwd: Path) -> str:
    """Run a command in a folder for its files, and return its output."""
    if not command.exists():
        pytest.skip(f"no {command.parents[1].name}; scripts/setup-clients makes it")
    environment = os.environ | {"NO_PROXY": "*", "COLUMNS": "200", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_aiperf(demo: Served, tmp_path: Path) -> None:
    ran(
        LOAD / "aiperf",
        *("profile", "--model", demo.model, "--tokenizer", MODEL_DIR, "--url", demo.url),
        *("--endpoint-type", "chat", "--streaming", "--request-count", NUMBER, "--concurrency", 2, "--ui", "none"),
        *("--synthetic-input-tokens-mean", 16, "--output-tokens-mean", 6),
        *("--image-width-mean", 64, "--image-height-mean", 64, "--image-batch-size", 1, "--image-format", "png"),
        *("--artifact-dir", tmp_path / "aiperf", "--no-gpu-telemetry"),
        cwd=tmp_path,
    )
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    results = json.loads(found.read_text())
    # an answer that is all special tokens has no text, and counts as an error there
    assert 0 < results["request_count"]["avg"] <= NUMBER
    assert results["time_to_first_token"]["avg"] > 0
    with demo.client() as client:
        answers = scrape(client)
    assert answers.total("http_requests_total", handler=CHAT, status="200") >= NUMBER
    assert answers.total("http_requests_total", handler=CHAT) == answers.total(
        "http_requests_total", handler=CHAT, status="200"
    )


def test_guidellm(demo: Served, tmp_path: Path) -> None:
    ran(
        LOAD / "guidellm",
        *("run", "--backend", f"kind=openai_http,target={demo.url},model={demo.model}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_DIR}", "--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUMBER}", "--disable-console"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=6"),
        *("--data", "kind=synthetic_image,width=64,height=64,format=png"),
        *("--output", f"kind=json,path={tmp_path / 'results.json'}"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (NUMBER, 0)


@pytest.mark.skipif(not VLLM, reason="TRIPTYCH_TEST_VLLM doesn't say where vLLM's command is")
@pytest.mark.parametrize(
    ("backend", "endpoint", "dataset"),
    [
        ("openai-chat", "/v1/chat/completions", "random-mm"),
        ("openai-chat", "/v1/chat/completions", "random"),
        ("openai", "/v1/completions", "random"),
        ("openai-responses", "/v1/responses", "random"),
    ],
)
def test_vllms_bench_serve(demo: Served, tmp_path: Path, backend: str, endpoint: str, dataset: str) -> None:
    pictures = (
        *("--random-mm-base-items-per-request", 2, "--random-mm-num-mm-items-range-ratio", 0),
        *("--random-mm-limit-mm-per-prompt", json.dumps({"image": 2, "video": 0})),
        *("--random-mm-bucket-config", "{(64, 64, 1): 1.0}"),
    )
    ran(
        Path(VLLM),
        *("bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", demo.url),
        *("--model", demo.model, "--tokenizer", MODEL_DIR, "--dataset-name", dataset, "--num-prompts", NUMBER),
        *("--random-input-len", 16, "--random-output-len", 6, "--disable-tqdm"),
        *(pictures if dataset == "random-mm" else ()),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "results.json"),
        cwd=tmp_path,
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["completed"], results["failed"]) == (NUMBER, 0)
    assert results["total_output_tokens"] == NUMBER * 6
