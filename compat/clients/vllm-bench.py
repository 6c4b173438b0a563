# needs: system vllm (scripts/setup-peers DIR makes it in DIR/vllm/bin; put that on PATH)
"""vLLM's ``bench serve``: chat, completions and responses, with pictures; it always streams."""

import json
import shutil

from checks import CHECKPOINT, FOLDER, MODEL, URL, command, lacks, run

NUMBER, TOKENS = 4, 6
PICTURES = (
    *("--random-mm-base-items-per-request", 2, "--random-mm-num-mm-items-range-ratio", 0),
    *("--random-mm-limit-mm-per-prompt", json.dumps({"image": 2, "video": 0})),
    *("--random-mm-bucket-config", "{(64, 64, 1): 1.0}"),
)


def load(backend: str, path: str, dataset: str, *more: object) -> None:
    """Send requests; raises AssertionError unless all succeed with as many tokens as asked for."""
    name = f"results-{len(list(FOLDER.iterdir()))}.json"
    command(
        *("vllm", "bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", URL),
        *("--model", MODEL, "--tokenizer", CHECKPOINT, "--dataset-name", dataset, "--num-prompts", NUMBER),
        *("--random-input-len", 16, "--random-output-len", TOKENS, "--disable-tqdm", *more),
        *("--save-result", "--result-dir", FOLDER, "--result-filename", name),
    )
    results = json.loads((FOLDER / name).read_text())
    assert (results["completed"], results["failed"]) == (NUMBER, 0), results
    assert results["total_output_tokens"] == NUMBER * TOKENS, results["total_output_tokens"]


def text() -> None:
    load("openai", "/v1/completions", "random")
    load("openai-responses", "/v1/responses", "random")


def image() -> None:
    load("openai-chat", "/v1/chat/completions", "random-mm", *PICTURES)


def stream() -> None:
    load("openai-chat", "/v1/chat/completions", "random")


checks = {"text": text, "image": image, "stream": stream, "turns": lacks("not asked of it")}
checks |= {"tool": lacks("not asked of it"), "context": lacks("it counts errors of all kinds together")}
run(checks if shutil.which("vllm") else dict.fromkeys(checks, lacks("no vllm on PATH")))
