# needs: pip instructor>=1.17,<2
"""Instructor: a pydantic model of an answer, by tools and by JSON schemas."""

from typing import Any

import instructor
from checks import IMAGE, LONG, MODEL, WEATHER, expect, failure, run
from instructor.v2.core.errors import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
CLIENTS = [instructor.from_openai(OpenAI(max_retries=0), mode=mode) for mode in MODES]


class get_weather(BaseModel):  # noqa: N801 - the tool's name
    """Tells the weather of a city."""

    city: str


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def plain(*messages: Any) -> Any:
    answer = CLIENTS[0].create(model=MODEL, response_model=None, messages=messages)
    return answer.choices[0].message.content


def text() -> None:
    expect(plain(user("Hi")), "Hello from Triptych.")
    for client in CLIENTS:
        answer = client.create(
            model=MODEL, max_tokens=100, response_model=get_weather, messages=[user("Hi")], max_retries=0
        )
        expect(answer.city, "Hello from Triptych.")


def image() -> None:
    picture = instructor.Image.from_path(str(IMAGE))
    expect(plain(user(["What is it?", picture])), "I see a picture.")


def stream() -> None:
    for client in CLIENTS:
        partial = client.create_partial(
            model=MODEL, max_tokens=100, response_model=get_weather, messages=[user("Hi")], max_retries=0
        )
        *_, last = partial
        expect(last.city, "Hello from Triptych.")


def turns() -> None:
    expect(plain(user("Hi"), {"role": "assistant", "content": plain(user("Hi"))}, user("And now?")), "Hello again.")


def tool() -> None:
    answer = CLIENTS[0].create(
        model=MODEL, max_tokens=100, response_model=get_weather, messages=[user(WEATHER)], max_retries=0
    )
    expect(answer.city, "Paris")


def context() -> None:
    for client in CLIENTS:
        asked = {
            "model": MODEL,
            "max_tokens": 100,
            "response_model": get_weather,
            "messages": [user(LONG)],
            "max_retries": 0,
        }
        expect(failure(InstructorRetryException, client.create, **asked), "context_length_exceeded")


run({"text": text, "image": image, "stream": stream, "turns": turns, "tool": tool, "context": context})
