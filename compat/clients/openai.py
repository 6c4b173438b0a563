# needs: pip openai>=3,<4
"""OpenAI's SDK for Python, over chat completions and responses."""

from typing import Any

import openai
from checks import CITY, LONG, MODEL, PICTURE_URL, TOOL, WEATHER, expect, failure, run

client = openai.OpenAI(max_retries=0)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: Any, **settings: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **settings).choices[0].message


def respond(given: Any, **settings: Any) -> Any:
    return client.responses.create(model=MODEL, input=given, **settings)


def text() -> None:
    expect(chat(user("Hi")).content, "Hello from Triptych.")
    expect(respond("Hi").output_text, "Hello from Triptych.")


def image() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    expect(chat(user(parts)).content, "I see a picture.")
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURE_URL}]
    expect(respond([user(parts)]).output_text, "I see a picture.")


def stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=[user("Hi")]) as events:
        expect("".join(event.delta for event in events if event.type == "content.delta"), "Hello from Triptych.")
    with client.responses.stream(model=MODEL, input="Hi") as events:
        found = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        expect(found, "Hello from Triptych.")
        expect(events.get_final_response().output_text, "Hello from Triptych.")


def turns() -> None:
    expect(chat(user("Hi"), chat(user("Hi")), user("And now?")).content, "Hello again.")
    expect(respond([user("Hi"), *respond("Hi").output, user("And now?")]).output_text, "Hello again.")


def tool() -> None:
    called = chat(user(WEATHER), tools=[TOOL])
    (call,) = called.tool_calls
    expect(call.function.arguments, "Paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    expect(chat(user(WEATHER), called, result, tools=[TOOL]).content, "The tool answered.")
    tools = [{"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}]
    answer = respond(WEATHER, tools=tools)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    expect(call.arguments, "Paris")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    expect(respond([user(WEATHER), *answer.output, result], tools=tools).output_text, "The tool answered.")


def context() -> None:
    expect(failure(openai.BadRequestError, chat, user(LONG)).code, "context_length_exceeded")
    expect(failure(openai.BadRequestError, respond, LONG).code, "context_length_exceeded")


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
