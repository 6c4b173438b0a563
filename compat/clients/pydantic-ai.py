# needs: pip pydantic-ai-slim[openai]>=2.68,<3
"""Pydantic AI's agents, over chat completions and responses."""

import asyncio

from checks import IMAGE, LONG, MODEL, WEATHER, expect, failure, run
from openai import AsyncOpenAI
from pydantic_ai import Agent, BinaryContent, ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

# one loop: the client's connections can't be shared by loops
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
PROVIDER = OpenAIProvider(openai_client=AsyncOpenAI(max_retries=0))
AGENTS = [Agent(kind(MODEL, provider=PROVIDER)) for kind in (OpenAIChatModel, OpenAIResponsesModel)]
CITIES: list[str] = []


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    CITIES.append(city)
    return "sunny"


def text() -> None:
    for agent in AGENTS:
        expect(agent.run_sync("Hi").output, "Hello from Triptych.")


def image() -> None:
    for agent in AGENTS:
        picture = BinaryContent(data=IMAGE.read_bytes(), media_type="image/png")
        expect(agent.run_sync(["What is it?", picture]).output, "I see a picture.")


def stream() -> None:
    async def pieces(agent: Agent[None, str]) -> str:
        async with agent.run_stream("Hi") as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])

    for agent in AGENTS:
        expect(loop.run_until_complete(pieces(agent)), "Hello from Triptych.")


def turns() -> None:
    for agent in AGENTS:
        first = agent.run_sync("Hi")
        expect(agent.run_sync("And now?", message_history=first.all_messages()).output, "Hello again.")


def tool() -> None:
    for agent in AGENTS:
        CITIES.clear()
        able = Agent(agent.model, tools=[get_weather])
        expect(able.run_sync(WEATHER).output, "The tool answered.")
        expect(CITIES, "['Paris']")


def context() -> None:
    for agent in AGENTS:
        failure(ModelContextWindowExceededError, agent.run_sync, LONG)


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
