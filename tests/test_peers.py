"""``bench/peers.py``: its tables, and one comparison with servers that start, fail and are interrupted."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.commands import ROOT, running, wait_for
from tests.support.processes import is_gone

FIGURES = {"short": 0, "errors": []}


def run(row: str, number: int, ttft: list[float], tpot: list[float], at_8: float, **more: Any) -> dict[str, Any]:
    figures = {"ttft_ms": ttft, "tpot_ms": tpot, "tokens_per_second_8": at_8, "prompt_tokens": 345}
    return {"row": row, "round": number, "figures": FIGURES | figures | more}


def result() -> dict[str, Any]:
    rows = {
        "Triptych --dtype bfloat16": {"engine": "Triptych", "settings": "--dtype bfloat16", "weights": "bfloat16"},
        "vLLM --dtype bfloat16": {"engine": "vLLM", "settings": "--dtype bfloat16", "weights": "bfloat16"},
        "llama.cpp F16": {"engine": "llama.cpp", "settings": "F16", "weights": "F16", "command": "llama-server -m F16"},
        "llama.cpp Q8_0": {"engine": "llama.cpp", "settings": "Q8_0", "weights": "Q8_0"},
    }
    ours, vllm, half, _ = rows
    return {
        "date": "2026-01-02",
        "machine": {"cores": 2, "processor": "some", "memory_gib": 8.0, "instructions": ["avx2"]},
        "versions": {"triptych": "0.1"},
        "model": {"name": "mid", "parameters": 483e6, "dtype": "bfloat16"},
        "load": {
            "images": 1,
            "width": 448,
            "height": 448,
            "words": 128,
            "output_tokens": 32,
            "rounds": 2,
            "requests": 3,
            "at_a_time": [8],
            "crowd_requests": 16,
        },
        "left_out": ["a peer is left out: why"],
        "rows": rows,
        "runs": [
            run(ours, 0, [500.0, 400.0, 9000.0], [12.0], 40.0, encode_ms=200.0, read_share=0.7),
            run(vllm, 0, [1000.0], [40.0], 20.0),
            run(half, 0, [1000.0], [24.0], 16.0, short=2, errors=["500: no"]),
            {"row": "llama.cpp Q8_0", "round": 0, "failed": "it ended with 1: out of memory"},
            run(ours, 1, [600.0], [14.0], 44.0, encode_ms=240.0, read_share=0.9),
            run(vllm, 1, [1000.0], [40.0], 20.0),
        ],
    }


def report(found: dict[str, Any], folder: Path, *options: str) -> str:
    (folder / "found.json").write_text(json.dumps(found))
    command = [sys.executable, "-m", "bench.peer_report", str(folder / "found.json"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_report(tmp_path: Path) -> None:
    text = report(result(), tmp_path)
    for line in (
        "- model: 483 million parameters, stored in bfloat16",
        "- load: 1 image of 448 × 448 and 128 words in, 32 tokens out, greedy",
        # medians of each round's requests, then over the rounds
        "| Triptych | `--dtype bfloat16` | 550 (500–600) | 13.0 (12.0–14.0) | 42.0 (40.0–44.0) | 345 |",
        "| llama.cpp | `F16` | 1,000 | 24.0 | 16.0 | 345 |",
        "| llama.cpp | `Q8_0` | – | – | – | – |",
        "- a peer is left out: why",
        "- llama.cpp F16, round 1: 2 answers had another number of tokens than asked for",
        "- llama.cpp F16, round 1: 1 requests failed, the first with: 500: no",
        "- llama.cpp Q8_0, round 1: failed: it ended with 1: out of memory",
        "| `--dtype bfloat16` | 220 (200–240) | – | 0.80 (0.70–0.90) |",
        "| settings | figure | vLLM --dtype bfloat16 | llama.cpp F16 |",
        "| `--dtype bfloat16` | time to first token (ms) | 0.55 | 0.55 |",
        "| `--dtype bfloat16` | output tokens/s, 8 at a time | 2.10 | 2.62 |",
        "| `--dtype bfloat16` | time to first token (ms) | vLLM --dtype bfloat16 | 0.55 | ≤ 0.8 | yes |",
        "| `--dtype bfloat16` | output tokens/s, 8 at a time | vLLM --dtype bfloat16 | 2.10 | ≥ 1.3 | yes |",
        "| `--dtype bfloat16` | time to first token (ms) | llama.cpp F16 | 0.55 | ≤ 0.5 | no |",
        "| `--dtype bfloat16` | weight bytes read ÷ bandwidth | – | 0.80 | ≥ 0.75 | yes |",
        "- `llama-server -m F16`",
    ):
        assert line in text.splitlines(), line


def test_accuracy_stands_beside_speed(tmp_path: Path) -> None:
    """Of a format in two files, that of the last counts; formats that weren't measured have none."""
    files = []
    for number, (model, formats) in enumerate(
        [
            ("first", {"bfloat16": {"kl_mean": 0.5, "top_1": 0.1}, "llama.cpp F16": {"kl_mean": 2e-06, "top_1": 0.99}}),
            ("second", {"bfloat16": {"kl_mean": 0.0002, "top_1": 0.991}}),
        ]
    ):
        files.append(str(tmp_path / f"{number}.json"))
        Path(files[-1]).write_text(json.dumps({"text": {"model": model, "formats": formats}}))
    lines = report(result(), tmp_path, "--accuracy", *files).splitlines()
    assert "- KL divergence and same token: of the weight format, on first, second" in lines
    rows = {
        line.split(" | ")[1]: line.split(" | ")[-2:] for line in lines if line.startswith(("| Triptych", "| llama"))
    }
    assert rows["`--dtype bfloat16`"] == ["0.0002", "0.991 |"]
    assert rows["`F16`"] == ["2e-06", "0.99 |"]
    assert rows["`Q8_0`"] == ["–", "– |"]


def test_an_impossible_share_of_the_bandwidth_meets_no_goal(tmp_path: Path) -> None:
    found = result()
    found["runs"][0]["figures"]["read_share"] = 1.4
    lines = report(found, tmp_path).splitlines()
    where = "Triptych --dtype bfloat16, round 1"
    assert (
        f"- {where}: weights were read faster than the bandwidth that was measured, so their share says nothing"
        in lines
    )
    assert not any("÷ bandwidth | – |" in line for line in lines)


def test_report_without_peers_or_pictures(tmp_path: Path) -> None:
    found = result()
    found["rows"] = {name: row for name, row in found["rows"].items() if row["engine"] == "Triptych"}
    found["runs"] = [found["runs"][0]]
    found["load"]["images"] = 0
    text = report(found, tmp_path)
    assert "- load: 128 words in, 32 tokens out, greedy" in text
    assert "÷ peer |" not in text.partition("## Goals")[0]
    assert "| Triptych | `--dtype bfloat16` | 500 | 12.0 | 40.0 | 345 |" in text


def test_help() -> None:
    command = [sys.executable, "-m", "bench.peers", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--llama-cpp DIR" in said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("peers") / "tiny")


def comparison(model: Path, *more: str | Path) -> list[str]:
    load = ["--quick", "--words", "16", "--output-tokens", "4"]
    return [sys.executable, "-m", "bench.peers", "--model", str(model), *load, *map(str, more)]


@pytest.mark.slow
def test_rows_that_fail_leave_the_others(model: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "peers.json", tmp_path / "peers.md"
    rows: list[str | Path] = ["--triptych", "--no-such-flag 1", "--dtype float32 --threads 1", "--vllm", tmp_path]
    with running(comparison(model, *rows, "--out", out, "--markdown", page), ROOT, {"OMP_NUM_THREADS": "1"}) as command:
        assert command.end(120.0) == 0, command.text
    found = json.loads(out.read_text())
    bad, good = found["runs"]
    assert "no --no-such-flag" in bad["failed"]
    figures = good["figures"]
    assert (len(figures["ttft_ms"]), len(figures["tpot_ms"]), figures["short"], figures["errors"]) == (2, 2, 0, [])
    assert all(figures[name] > 0 for name in ("tokens_per_second_8", "encode_ms", "prefill_ms", "read_share"))
    row = found["rows"]["Triptych --dtype float32 --threads 1"]
    assert row["weights"] == "float32"
    assert row["command"].endswith("--served-model-name m --dtype float32 --threads 1")
    assert found["left_out"] == [
        f"vLLM is left out: there is no {tmp_path}/bin/python",
        "llama.cpp is left out: --llama-cpp isn't given",
    ]
    assert page.read_text().rstrip() in command.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_the_comparison(model: Path, number: signal.Signals) -> None:
    with running(comparison(model, "--triptych", "--threads 1"), ROOT, {"OMP_NUM_THREADS": "1"}) as command:
        comparing = psutil.Process(command.process.pid)

        def has_started() -> bool:
            command.descendants = comparing.children(recursive=True)
            with suppress(psutil.Error):  # one that has just ended
                return any("triptych.server.instance_main" in child.cmdline() for child in command.descendants)
            return False

        wait_for(has_started, 60.0, command)
        command.send(number)
        assert command.end(60.0) != 0
        assert all(is_gone(child.pid) for child in command.descendants)
