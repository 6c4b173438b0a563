"""Clients that must work unchanged: OpenAI's, asynchronous; LangChain; curl. ``scripts/compat`` runs others."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.support.reasoning import thinking_service
from tests.support.serving import CHAT, Served, image, image_part, text_part
from tests.support.tools import CITY

PICTURE = [image_part(image(seed=5)), text_part("What is it?")]
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": CITY}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("clients") / "thinker") as service:
        yield service


def expected(service: Served, content: Any) -> str:
    return service.text(content, max_tokens=12, temperature=0, ignore_eos=False)


def test_openais_asynchronous_client(thinker: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, content: Any) -> str:
        messages: Any = [{"role": "user", "content": content}]
        stream = await client.chat.completions.create(
            model=thinker.model, messages=messages, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def both() -> list[str]:
        url = f"{thinker.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            return list(await asyncio.gather(ask(client, "Hello"), ask(client, PICTURE)))

    assert asyncio.run(both()) == [expected(thinker, "Hello"), expected(thinker, PICTURE)]


class Weather(pydantic.BaseModel, extra="forbid"):
    """The weather."""

    days: int = pydantic.Field(ge=1, le=3)


@pytest.mark.filterwarnings("ignore")
def test_langchain(thinker: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{thinker.url}/v1", api_key="none", model=thinker.model, temperature=0, max_tokens=12, max_retries=0
    )
    for content in ("Hello", PICTURE):
        messages = [("user", content)]
        assert model.invoke(messages).content == expected(thinker, content)
        assert "".join(chunk.content for chunk in model.stream(messages)) == expected(thinker, content)
    longer = model.model_copy(update={"max_tokens": 900})
    called = longer.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("Hello")
    assert called.tool_calls[0]["name"] == "weather"
    assert called.tool_calls[0]["args"]["days"] in (1, 22)
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(Weather, method=method).invoke("Hello"), Weather)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(thinker: Served) -> None:
    body = thinker.body(PICTURE, max_tokens=12, temperature=0, ignore_eos=False)

    def curl(*arguments: str, sent: Any = body) -> str:
        command = ["curl", "-sS", "--noproxy", "*", "-H", "Content-Type: application/json", "-d", "@-", *arguments]
        return subprocess.run(
            command, input=json.dumps(sent), capture_output=True, text=True, timeout=30, check=True
        ).stdout

    answer = json.loads(curl(thinker.url + CHAT))
    assert answer["choices"][0]["message"]["content"] == expected(thinker, PICTURE)
    lines = curl("-N", thinker.url + CHAT, sent=body | {"stream": True}).splitlines()
    assert lines[-2] == "data: [DONE]"
    assert json.loads(curl(thinker.url + CHAT, sent={}))["error"]["param"] == "messages"
