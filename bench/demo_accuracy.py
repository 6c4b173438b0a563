"""Asks the demo model about pictures from seeds it was never trained on, over HTTP, and compares every answer with the
right one and with what transformers' ``generate`` says on the same checkpoint.

    python -m bench.demo_accuracy --questions 500 --topology 1E1PD
"""

import argparse
import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from demo.questions import EVALUATION_SEEDS, Example, make_example
from triptych.cluster.service import LocalService
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.topology import Topology

AT_A_TIME = 8


@dataclass(frozen=True)
class Asked:
    """A question with three answers: the right one, Triptych's and, when it was asked, transformers'."""

    example: Example
    answer: str
    reference: str | None = None


async def ask_all(url: str, examples: Sequence[Example]) -> list[str]:
    """Greedy answers over HTTP, several at a time."""
    places = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120.0) as client:

        async def ask(example: Example) -> str:
            async with places:
                response = await client.post("/v1/chat/completions", json=_body(example))
            response.raise_for_status()
            content: str = response.json()["choices"][0]["message"]["content"]
            return content

        return list(await asyncio.gather(*(ask(example) for example in examples)))


def _body(example: Example) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else _image_part(example, part)
        for part in example.parts
    ]
    return {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": content}]}


def _image_part(example: Example, index: int) -> dict[str, Any]:
    data = io.BytesIO()
    example.pictures[index].save(data, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()},
    }


async def answers_over_http(folder: Path, examples: Sequence[Example], topology: str, dtype: str) -> list[str]:
    """Starts the service, asks, stops it."""
    config = ServeConfig(
        model=folder,
        engine=EngineConfig(dtype=dtype),
        frontend=FrontendConfig.of(port=0, served_model_name="demo"),
    )
    async with LocalService(config, Topology.parse(topology), show=lambda _: None) as service:
        await service.wait_until_ready()
        return await ask_all(service.url, examples)


def reference_answers(folder: Path, examples: Sequence[Example]) -> list[str]:
    """transformers' answers. Imported late: only this needs it."""
    from demo.evaluate import Reference

    reference = Reference(folder)
    return [reference.answer(example.pictures, example.parts) for example in examples]


def report(asked: Sequence[Asked]) -> dict[str, Any]:
    """Shares of exact answers, in all and by kind, and how many answers differ from transformers'."""
    kinds = Counter(item.example.kind for item in asked)
    right = Counter(item.example.kind for item in asked if item.answer == item.example.answer)
    wrong = [(item.example.kind, item.example.parts, item.answer, item.example.answer) for item in asked]
    return {
        "questions": len(asked),
        "exact": right.total() / len(asked),
        "differ from transformers": sum(item.reference is not None and item.reference != item.answer for item in asked),
        "by kind": {kind: f"{right[kind]}/{count}" for kind, count in sorted(kinds.items())},
        "wrong": [entry for entry in wrong if entry[2] != entry[3]][:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    examples = [make_example(seed) for seed in EVALUATION_SEEDS[: options.questions]]
    answers = asyncio.run(answers_over_http(options.model, examples, options.topology, options.dtype))
    references = reference_answers(options.model, examples)
    asked = [Asked(*item) for item in zip(examples, answers, references, strict=True)]
    print(json.dumps(report(asked), indent=2))


if __name__ == "__main__":
    main()
