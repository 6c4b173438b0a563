# needs: pip anthropic>=2,<3
"""Anthropic's SDK for Python, over its messages."""

from typing import Any

import anthropic
from checks import CITY, LONG, MODEL, PICTURE, WEATHER, expect, failure, run

client = anthropic.Anthropic(max_retries=0)
TOOLS: Any = [{"name": "get_weather", "description": "Tells it.", "input_schema": CITY}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(*messages: Any, **settings: Any) -> Any:
    return client.messages.create(model=MODEL, messages=messages, max_tokens=100, **settings)


def text() -> None:
    expect(ask(user("Hi")).content[0].text, "Hello from Triptych.")
    counted = client.messages.count_tokens(model=MODEL, messages=[user("Hi")])
    assert counted.input_tokens > 0


def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    expect(ask(user(parts)).content[0].text, "I see a picture.")


def stream() -> None:
    with client.messages.stream(model=MODEL, messages=[user("Hi")], max_tokens=100) as events:
        expect("".join(events.text_stream), "Hello from Triptych.")
        expect(events.get_final_message().stop_reason, "end_turn")


def turns() -> None:
    first = ask(user("Hi"))
    expect(ask(user("Hi"), {"role": "assistant", "content": first.content}, user("And now?")).content, "Hello again.")


def tool() -> None:
    called = ask(user(WEATHER), tools=TOOLS)
    expect(called.stop_reason, "tool_use")
    (call,) = [block for block in called.content if block.type == "tool_use"]
    expect(call.input, "{'city': 'Paris'}")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    answer = ask(user(WEATHER), {"role": "assistant", "content": called.content}, user([result]), tools=TOOLS)
    expect(answer.content[0].text, "The tool answered.")


def context() -> None:
    error = failure(anthropic.BadRequestError, ask, user(LONG))
    expect(error.body["error"]["type"], "invalid_request_error")
    expect(error.body["error"]["message"], "prompt is too long")


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
