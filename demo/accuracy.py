"""Sends questions to the demo model over HTTP, and compares its answers with the right ones and with transformers'."""

import asyncio
import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from demo.questions import Example
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.topology import Topology

AT_A_TIME = 8
"""Maximum number of requests in flight."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """A question with Triptych's answer and, optionally, transformers'."""

    example: Example
    """The question and the right answer."""
    answer: str
    reference: str | None = None
    """transformers' answer."""


async def ask_all(url: str, examples: Sequence[Example]) -> list[str]:
    """Return greedy answers over HTTP, with several requests in flight."""
    slots = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120.0) as client:

        async def ask(example: Example) -> str:
            async with slots:
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


async def answers_over_http(
    folder: Path, examples: Sequence[Example], topology: str, engine: EngineConfig
) -> list[str]:
    """Start the service, ask all questions, and stop it."""
    config = ServeConfig(
        model=folder,
        engine=engine,
        frontend=FrontendConfig.of(port=0, served_model_name="demo"),
    )
    async with Service(config, Topology.parse(topology), show=lambda _: None) as service:
        await service.wait_until_ready()
        return await ask_all(service.url, examples)


def reference_answers(folder: Path, examples: Sequence[Example]) -> list[str]:
    """Return transformers' answers."""
    from demo.evaluate import Reference  # here, because only this function needs transformers

    reference = Reference(folder)
    return [reference.answer(example.pictures, example.parts) for example in examples]


def report(answers: Sequence[EvaluatedAnswer]) -> dict[str, Any]:
    """Return the share of exact answers, in total and by kind, and the number that differ from transformers'."""
    kinds = Counter(item.example.kind for item in answers)
    right = Counter(item.example.kind for item in answers if item.answer == item.example.answer)
    wrong = [(item.example.kind, item.example.parts, item.answer, item.example.answer) for item in answers]
    return {
        "questions": len(answers),
        "exact": right.total() / len(answers),
        "differ from transformers": sum(
            item.reference is not None and item.reference != item.answer for item in answers
        ),
        "by kind": {kind: f"{right[kind]}/{count}" for kind, count in sorted(kinds.items())},
        "wrong": [entry for entry in wrong if entry[2] != entry[3]][:20],
    }
