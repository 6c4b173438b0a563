"""Conversations as OpenAI's API allows them, each text of which has a word of its own."""

from typing import Any

Message = dict[str, Any]


def texts(*words: str) -> list[Message]:
    return [{"type": "text", "text": word} for word in words]


def system(content: Any = "system0") -> Message:
    return {"role": "system", "content": content}


def user(content: Any = "user0") -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any = "answer0") -> Message:
    return {"role": "assistant", "content": content}


def calls(*ids: str, arguments: Any = '{"city": "Rome0"}', content: Any = "") -> Message:
    function = {"name": "weather0", "arguments": arguments}
    made = [{"id": one, "type": "function", "function": dict(function)} for one in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(call_id: str, content: Any = "result0") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CONVERSATIONS: dict[str, list[Message]] = {
    "system": [system(), user()],
    "system as a list": [system(texts("system0", "system1")), user()],
    "several systems": [system("system0"), system("system1"), user()],
    "several systems as lists": [system(texts("system0", "system1")), system(texts("system2")), user()],
    "system later": [system(), user(), assistant(), system("system1"), user("user1")],
    "system last": [user(), assistant(), user("user1"), system("system1")],
    "user as a list": [user(texts("user0", "user1"))],
    "users in a row": [user(), user("user1"), assistant(), user(texts("user2", "user3"))],
    "assistants in a row": [user(), assistant(), assistant("answer1"), user("user1")],
    "assistant as a list": [user(), assistant(texts("answer0", "answer1")), user("user1")],
    "assistant first": [assistant(), user()],
    "call": [user(), calls("call_abcdefghijkl"), result("call_abcdefghijkl")],
    "call without arguments": [user(), calls("c", arguments=""), result("c")],
    "call with null": [user(), calls("c", arguments=None), result("c")],
    "call with broken arguments": [user(), calls("c", arguments="{broken0"), result("c")],
    "call with text": [user(), calls("c", content="answer0"), result("c")],
    "call with a list": [user(), calls("c", content=texts("answer0", "answer1")), result("c")],
    "calls": [user(), calls("c", "d"), result("c"), result("d", "result1"), assistant(), user("user1")],
    "result as a list": [user(), calls("c"), result("c", texts("result0", "result1"))],
    "result alone": [user(), result("c")],
    "user after a result": [user(), calls("c"), result("c"), user("user1")],
    "call between texts": [user(), calls("c", content="answer0"), result("c"), assistant("answer1"), user("user1")],
    "calls one by one": [user(), calls("c"), result("c"), calls("d"), result("d", "result1"), assistant()],
    "results in another order": [
        user(),
        calls("c", "d", content="answer0"),
        result("d"),
        result("c", "result1"),
        user(),
    ],
    "calls without results": [user(), calls("c", "d"), result("d"), user("user1")],
    "system after a result": [user(), calls("c"), result("c"), system("system1"), user("user1")],
    "users after a result": [user(), calls("c"), result("c"), user("user1"), user("user2"), assistant(), user("user3")],
    "system before a result": [system(), system("system1"), user(), calls("c", content="answer0"), result("c")],
    "result of no call": [user(), calls("c"), result("d"), assistant()],
    "system alone": [system()],
    "systems and an answer": [system(), system("system1"), assistant()],
    "assistant alone": [assistant()],
    "empty texts": [system(""), user([]), assistant(""), user("user0")],
}
