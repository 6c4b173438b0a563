"""Parts of messages in the forms of other APIs mean what those of the API's own form do."""

import json
from typing import Any

import pytest

from triptych.api.response_input import chat_messages
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest, ChatMessage
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest

URL = "data:image/png;base64,aGk="
TEXT, HI = {"type": "text", "text": "x"}, {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def parsed(message: dict[str, Any]) -> ChatMessage:
    body = json.dumps({"messages": [HI, message]}).encode()
    return parse_request(ChatCompletionRequest, body).messages[1]


@pytest.mark.parametrize(
    ("part", "usual"),
    [
        ("x", TEXT),
        ({"type": "input_text", "text": "x"}, TEXT),
        ({"type": "output_text", "text": "x", "annotations": [], "logprobs": []}, TEXT),
        ({"type": "image_url", "image_url": URL}, IMAGE),
        ({"type": "input_image", "image_url": URL, "file_id": None}, IMAGE),
        (
            {"type": "input_image", "image_url": URL, "detail": "low"},
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        ),
        ({"type": "image", "image": URL}, IMAGE),
        ({"type": "image", "url": URL}, IMAGE),
        ({"type": "video_url", "video_url": URL}, {"type": "video_url", "video_url": {"url": URL}}),
        ({"type": "video", "video": URL}, {"type": "video_url", "video_url": {"url": URL}}),
        ({"type": "audio_url", "audio_url": URL}, {"type": "audio_url", "audio_url": {"url": URL}}),
        ({"type": "audio", "audio": URL}, {"type": "audio_url", "audio_url": {"url": URL}}),
    ],
)
def test_a_chats_parts(part: Any, usual: dict[str, Any]) -> None:
    made = parsed({"role": "user", "content": [part]})
    assert made.model_dump() == parsed({"role": "user", "content": [usual]}).model_dump()


@pytest.mark.parametrize(
    ("part", "usual"),
    [
        ("x", {"type": "input_text", "text": "x"}),
        (TEXT, {"type": "input_text", "text": "x"}),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "input_image", "image_url": URL, "detail": "low"},
        ),
        ({"type": "image_url", "image_url": URL}, {"type": "input_image", "image_url": URL}),
    ],
)
def test_parts_of_a_response(part: Any, usual: dict[str, Any]) -> None:
    def made(one: Any) -> list[dict[str, Any]]:
        body = json.dumps({"input": [{"role": "user", "content": [one]}]}).encode()
        return [message.model_dump() for message in chat_messages(parse_request(ResponsesRequest, body).input)]

    assert made(part) == made(usual)


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "I see.", "signature": "s"},
        {
            "type": "thinking",
            "thinking": [{"type": "text", "text": "I "}, {"type": "text", "text": "see."}],
            "closed": True,
        },
        {"type": "reasoning", "text": "I see."},
    ],
)
def test_thoughts_of_an_earlier_answer_are_its_reasoning(thought: dict[str, Any]) -> None:
    made = parsed({"role": "assistant", "content": [thought, TEXT]})
    assert made == parsed({"role": "assistant", "content": [TEXT], "reasoning_content": "I see."})
    with pytest.raises(InvalidRequest, match="reasoning_content is only for"):
        parsed({"role": "user", "content": [thought, TEXT]})


def test_what_a_tool_of_another_service_did_is_left_out() -> None:
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": [{"name": "f"}]}
    body = json.dumps({"input": [listed, HI, search]}).encode()
    (message,) = chat_messages(parse_request(ResponsesRequest, body).input)
    assert message.content == "hi"
    with pytest.raises(InvalidRequest, match="none of the items"):
        parse_request(ResponsesRequest, json.dumps({"input": [search]}).encode())


def test_a_schemas_format_may_be_flat_as_in_responses() -> None:
    def made(chosen: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"messages": [HI], "response_format": {"type": "json_schema"} | chosen}).encode()
        return parse_request(ChatCompletionRequest, body).model_dump()

    schema = {"name": "a", "strict": True, "schema": {"type": "boolean"}}
    assert made(schema) == made({"json_schema": schema})
