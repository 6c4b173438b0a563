# needs: own torch
# needs: pip guidellm>=0.8.1,<0.9
"""GuideLLM's load: chat with pictures, streamed and in one piece."""

import json

from checks import CHECKPOINT, FOLDER, MODEL, URL, command, lacks, run

NUMBER = 4
TEXT = "kind=synthetic_text,prompt_tokens=16,output_tokens=6"
PICTURES = "kind=synthetic_image,width=64,height=64,format=png"


def load(*data: str, stream: bool = False) -> None:
    """Send requests; raises AssertionError if any fails."""
    results = FOLDER / f"results-{len(list(FOLDER.iterdir()))}.json"
    backend = f"kind=openai_http,target={URL},model={MODEL},stream={str(stream).lower()}"
    command(
        *("guidellm", "run", "--backend", backend),
        *("--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}", "--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUMBER}", "--disable-console"),
        *(word for one in data for word in ("--data", one)),
        *("--output", f"kind=json,path={results}"),
    )
    (benchmark,) = json.loads(results.read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    # now and then it counts one request less than it was to send, without an error
    assert counts["successful"] in (NUMBER - 1, NUMBER), counts
    assert counts["errored"] == counts["incomplete"] == 0, counts


def text() -> None:
    load(TEXT)


def image() -> None:
    load(TEXT, PICTURES)


def stream() -> None:
    load(TEXT, stream=True)


checks = {"text": text, "image": image, "stream": stream, "turns": lacks("not asked of it")}
run(checks | {"tool": lacks("not asked of it"), "context": lacks("it counts errors of all kinds together")})
