# needs: pip llama-index-llms-openai-like>=0.8,<0.9
"""LlamaIndex's OpenAILike."""

from typing import Any

from checks import CONTEXT, IMAGE, LONG, MODEL, URL, WEATHER, expect, failure, run
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError

SETTINGS: Any = {"model": MODEL, "api_base": f"{URL}/v1", "context_window": CONTEXT, "max_retries": 0}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **SETTINGS)


def user(*blocks: object) -> ChatMessage:
    return ChatMessage(role="user", content=list(blocks) if len(blocks) > 1 else blocks[0])


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def text() -> None:
    expect(model.chat([user("Hi")]).message.content, "Hello from Triptych.")
    expect(OpenAILike(is_chat_model=False, max_tokens=20, **SETTINGS).complete("Hi").text, "Hello from Triptych.")


def image() -> None:
    asked = user(TextBlock(text="What is it?"), ImageBlock(path=IMAGE))
    expect(model.chat([asked]).message.content, "I see a picture.")


def stream() -> None:
    expect("".join(piece.delta for piece in model.stream_chat([user("Hi")])), "Hello from Triptych.")


def turns() -> None:
    first = model.chat([user("Hi")]).message
    expect(model.chat([user("Hi"), first, user("And now?")]).message.content, "Hello again.")


def tool() -> None:
    tools = [FunctionTool.from_defaults(get_weather)]
    called = model.chat_with_tools(tools, user_msg=WEATHER)
    (call,) = model.get_tool_calls_from_response(called)
    expect(call.tool_kwargs, "Paris")
    content = get_weather(**call.tool_kwargs)
    result = ChatMessage(role="tool", content=content, additional_kwargs={"tool_call_id": call.tool_id})
    answer = model.chat_with_tools(tools, chat_history=[user(WEATHER), called.message, result])
    expect(answer.message.content, "The tool answered.")


def context() -> None:
    expect(failure(BadRequestError, model.chat, [user(LONG)]).code, "context_length_exceeded")


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
