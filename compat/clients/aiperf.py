# needs: own torch
# needs: pip aiperf>=0.13,<0.14
"""NVIDIA's AIPerf: its load of chats, with pictures, streamed, and of conversations."""

import json

from checks import CHECKPOINT, FOLDER, MODEL, URL, command, lacks, run

NUMBER = 4
PICTURES = ("--image-width-mean", 64, "--image-height-mean", 64, "--image-batch-size", 1, "--image-format", "png")


def load(*more: object) -> None:
    """Send requests; raises AssertionError unless all succeed."""
    folder = FOLDER / f"load-{len(list(FOLDER.iterdir()))}"
    command(
        *("aiperf", "profile", "--model", MODEL, "--tokenizer", CHECKPOINT, "--url", URL, "--endpoint-type", "chat"),
        *("--concurrency", 2, "--ui", "none", "--synthetic-input-tokens-mean", 16, "--output-tokens-mean", 6),
        *("--artifact-dir", folder, "--no-gpu-telemetry", *more),
    )
    (found,) = folder.rglob("profile_export_aiperf.json")
    results = json.loads(found.read_text())
    assert results["request_count"]["avg"] == NUMBER, results["request_count"]
    assert not results.get("error_request_count", {}).get("avg"), results["error_request_count"]
    if "--streaming" in more:
        assert results["time_to_first_token"]["avg"] > 0


def text() -> None:
    load("--request-count", NUMBER)


def image() -> None:
    load("--request-count", NUMBER, *PICTURES)


def stream() -> None:
    load("--request-count", NUMBER, "--streaming")


def turns() -> None:
    load("--conversation-num", NUMBER // 2, "--conversation-turn-mean", 2, "--conversation-turn-stddev", 0)


checks = {"text": text, "image": image, "stream": stream, "turns": turns}
run(checks | {"tool": lacks("not asked of it"), "context": lacks("it counts errors of all kinds together")})
