"""Tools, and answers that call them."""

from typing import Any

import pydantic

from tests.support.reasoning import IDS
from tests.support.serving import Served

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"enum": [1, 22]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["a", "b"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"tells the {name}", "parameters": parameters}
    return {"type": "function", "function": function | more}


TOOLS = [tool("weather", CITY), tool("time", ZONE)]

FREE = {"ignore_eos": False, "max_tokens": 400, "temperature": 1.0}


def choice(service: Served, content: Any = "Hello", **settings: Any) -> dict[str, Any]:
    response = service.post(content, **(FREE | settings))
    assert response.status_code == 200, response.text
    (one,) = response.json()["choices"]
    return dict(one)


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """What ``choice`` returns, made from a stream as OpenAI's clients do."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    reason = stop = None
    for chunk in chunks:
        for one in chunk["choices"]:
            reason, stop = one["finish_reason"] or reason, one.get("stop_reason", stop)
            for name in ("content", "reasoning", "reasoning_content"):
                if one["delta"].get(name):
                    message[name] = message.get(name, "") + one["delta"][name]
            for delta in one["delta"].get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if delta["index"] == len(calls):
                    calls.append({"id": delta["id"], "type": delta["type"], "function": delta["function"]})
                else:
                    assert "id" not in delta
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": stop}


def without_ids(made: dict[str, Any]) -> dict[str, Any]:
    for call in made["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return made


THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {str(IDS["</think>"]): 5}}


class weather(pydantic.BaseModel):  # noqa: N801 - the tool's name is the class's
    """Tells the weather."""

    days: int = pydantic.Field(ge=1, le=3)
