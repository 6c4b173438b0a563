# needs: pip langchain-openai>=1.7,<2
"""LangChain's ChatOpenAI, over chat completions and responses."""

from typing import Any

from checks import LONG, MODEL, PICTURE_URL, WEATHER, expect, failure, run
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI

MODELS = [ChatOpenAI(model=MODEL, max_retries=0, use_responses_api=responses) for responses in (False, True)]
ASKED = HumanMessage(WEATHER)


@as_tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def text() -> None:
    for model in MODELS:
        expect(model.invoke("Hi").text, "Hello from Triptych.")


def image() -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    for model in MODELS:
        expect(model.invoke([HumanMessage(parts)]).text, "I see a picture.")


def stream() -> None:
    for model in MODELS:
        expect("".join(chunk.text for chunk in model.stream("Hi")), "Hello from Triptych.")


def turns() -> None:
    for model in MODELS:
        first = HumanMessage("Hi")
        expect(model.invoke([first, model.invoke([first]), HumanMessage("And now?")]).text, "Hello again.")


def tool() -> None:
    for model in MODELS:
        bound = model.bind_tools([get_weather])
        called = bound.invoke([ASKED])
        result = get_weather.invoke(called.tool_calls[0])
        assert isinstance(result, ToolMessage)
        expect(result.content, "sunny in Paris")
        expect(bound.invoke([ASKED, called, result]).text, "The tool answered.")


def context() -> None:
    for model in MODELS:
        failure(ContextOverflowError, model.invoke, LONG)


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
