# needs: pip openai-agents>=0.24,<1
"""OpenAI's Agents SDK, over chat completions and responses."""

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import LONG, MODEL, PICTURE_URL, WEATHER, expect, run
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)
loop = asyncio.new_event_loop()
CLIENT = AsyncOpenAI(max_retries=0)
CITIES: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    CITIES.append(city)
    return "sunny"


AGENTS = [
    Agent("helper", instructions="Be brief.", model=kind(MODEL, CLIENT), tools=tools)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    for tools in ([], [get_weather])
]


def ask(agent: Agent[Any], given: Any) -> Any:
    return loop.run_until_complete(Runner.run(agent, given))


def text() -> None:
    for agent in AGENTS:
        expect(ask(agent, "Hi").final_output, "Hello from Triptych.")


def image() -> None:
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURE_URL}]
    for agent in AGENTS:
        expect(ask(agent, [{"role": "user", "content": parts}]).final_output, "I see a picture.")


def stream() -> None:
    async def pieces(agent: Agent[Any]) -> str:
        events = Runner.run_streamed(agent, "Hi").stream_events()
        raw = [event.data async for event in events if event.type == "raw_response_event"]
        return "".join(event.delta for event in raw if event.type == "response.output_text.delta")

    for agent in AGENTS:
        expect(loop.run_until_complete(pieces(agent)), "Hello from Triptych.")


def turns() -> None:
    for agent in AGENTS:
        history = [*ask(agent, "Hi").to_input_list(), {"role": "user", "content": "And now?"}]
        expect(ask(agent, history).final_output, "Hello again.")


def tool() -> None:
    for agent in AGENTS[1::2]:
        CITIES.clear()
        expect(ask(agent, WEATHER).final_output, "The tool answered.")
        expect(CITIES, "['Paris']")


def context() -> None:
    for agent in AGENTS:
        try:
            ask(agent, LONG)
        except BadRequestError as error:
            expect(error.code, "context_length_exceeded")
        else:
            raise AssertionError("no error")


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
