"""Completions, responses and messages before vLLM servers: what those get, and what becomes of their answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import WORDS, gateway_and_server
from tests.support.scraping import scrape
from tests.support.serving import Served, image_part, text_part, wait_for
from tests.support.vllm_server import COMPLETIONS, VllmServer

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CALL = {"index": 0, "id": "call_x", "type": "function", "function": {"name": "look", "arguments": ""}}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning": "hm"},
    {"content": "I "},
    {"content": "look."},
    {"tool_calls": [CALL]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ' "it"}'}}]},
]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, VllmServer]]:
    kept = str(tmp_path_factory.mktemp("kept") / "responses.db")
    with gateway_and_server(folder, response_store=kept) as both:
        yield both


@pytest.fixture
def both(pair: tuple[Served, VllmServer]) -> Iterator[tuple[Served, VllmServer]]:
    service, server = pair
    server.bodies.clear()
    yield pair
    server.behaviours.clear()
    server.deltas, server.finish_reason, server.events = [], "stop", None
    service.settle()


def ask(service: Served, path: str, **fields: Any) -> httpx.Response:
    with service.client() as client:
        return client.post(path, json=fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def message(content: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}], **more}


def source() -> dict[str, Any]:
    """A picture as Anthropic's API has it."""
    kind, _, data = image_part()["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "you"], [1, 2], [[1, 2], [3]]])
def test_completions_are_passed_on(both: tuple[Served, VllmServer], prompt: Any) -> None:
    service, server = both
    answer = ask(service, COMPLETIONS, prompt=prompt, model=service.model, guided_something={"deep": [1]}, echo=True)
    assert answer.json()["choices"][0]["text"] == WORDS
    streamed = events(ask(service, COMPLETIONS, prompt=prompt, stream=True))
    assert [one["choices"][0]["text"] for one in streamed] == WORDS.split()
    assert server.bodies[0] == {
        "prompt": prompt, "model": server.model, "guided_something": {"deep": [1]}, "echo": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a <|image_pad|>"}, "prompt"),
        ({"prompt": ["a", "<|image_pad|>"]}, "prompt[1]"),
        ({"prompt": [[1], ["MEDIA"]]}, "prompt[1]"),
        ({"prompt": ["MEDIA"]}, "prompt"),
        ({"prompt": {"x": 1}}, "prompt"),
        ({"prompt": "a", "suffix": "<|image_pad|>"}, "suffix"),
        ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt": "a", "ec_transfer_params": {}}, "ec_transfer_params"),
        ({}, "prompt"),
    ],
)
def test_completions_that_clients_may_not_send(
    both: tuple[Served, VllmServer], fields: dict[str, Any], param: str
) -> None:
    service, server = both
    media = service.running.frontend.api.tokenizer.id_of("<|image_pad|>")
    fields = json.loads(json.dumps(fields).replace('"MEDIA"', str(media)))
    response = ask(service, COMPLETIONS, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not server.bodies


# ── messages and responses ───────────────────────────────────────────────────────────────────────────────────────


def test_a_message_is_asked_as_a_chat(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    earlier = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [source()]}]},
    ]
    fields = message([source(), text_part("a")], tools=[tool], stop_sequences=["!"], system="Be brief.", top_k=3)
    fields["messages"] += earlier
    answer = ask(
        service, MESSAGES, **fields, thinking={"type": "enabled", "budget_tokens": 1024}, tool_choice={"type": "any"}
    )
    assert answer.status_code == 200, answer.text
    (body,) = server.bodies
    system, asked, call, result = body.pop("messages")
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in asked["content"]] == ["image_embeds", "text"]
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    assert (result["role"], result["content"][0]["type"]) == ("tool", "image_embeds")
    assert result["content"][0]["uuid"] == asked["content"][0]["uuid"]
    assert body.pop("tools")[0]["function"]["parameters"] == SCHEMA
    assert body == {"model": server.model, "max_tokens": 9, "stop": ["!"], "top_k": 3, "tool_choice": "required"}


@pytest.mark.parametrize("stream", [False, True])
def test_messages_have_thoughts_text_and_calls(both: tuple[Served, VllmServer], *, stream: bool) -> None:
    service, server = both
    server.deltas, server.finish_reason = DELTAS, "tool_calls"
    tool = {"name": "look", "input_schema": SCHEMA}
    response = ask(service, MESSAGES, **message("a", tools=[tool], stream=stream))
    usage = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3}
    if stream:
        first, *_, last, end = events(response)
        assert (first["message"]["usage"], end["type"]) == (usage, "message_stop")
        assert (last["delta"]["stop_reason"], last["usage"]) == ("tool_use", usage)
        assert server.bodies[0]["stream_options"]["include_usage"]
        deltas = [one["delta"] for one in events(response) if one["type"] == "content_block_delta"]
        assert "".join(one.get("thinking", "") for one in deltas) == "hm"
        assert [one["text"] for one in deltas if "text" in one] == ["I ", "look."]
        assert "".join(one.get("partial_json", "") for one in deltas) == '{"at": "it"}'
        return
    answer = response.json()
    thought, text, call = answer["content"]
    assert (thought["thinking"], text["text"], call["input"]) == ("hm", "I look.", {"at": "it"})
    assert (answer["stop_reason"], answer["usage"]) == ("tool_use", usage)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_thoughts_text_and_calls(both: tuple[Served, VllmServer], *, stream: bool) -> None:
    service, server = both
    server.deltas, server.finish_reason = DELTAS, "tool_calls"
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}, {"type": "custom", "name": "free"}]
    picture = {"type": "input_image", "image_url": image_part()["image_url"]["url"]}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, picture]}]
    response = ask(service, RESPONSES, input=items, tools=tools, stream=stream, reasoning={"effort": "none"})
    answer = events(response)[-1]["response"] if stream else response.json()
    assert (answer["status"], answer["usage"]["output_tokens_details"]["reasoning_tokens"]) == ("completed", 1)
    thought, text, call = answer["output"]
    assert (thought["content"][0]["text"], text["content"][0]["text"]) == ("hm", "I look.")
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "it"})
    assert [part["type"] for part in server.bodies[0]["messages"][0]["content"]] == ["text", "image_embeds"]
    assert [tool["function"]["name"] for tool in server.bodies[0]["tools"]] == ["look", "free"]


def test_responses_continue_stored_ones(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    picture = {"type": "input_image", "image_url": image_part()["image_url"]["url"]}
    first = ask(service, RESPONSES, input=[{"role": "user", "content": [picture]}]).json()
    second = ask(service, RESPONSES, input="And?", previous_response_id=first["id"]).json()
    assert second["output"][0]["content"][0]["text"] == WORDS
    sent = server.bodies[1]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "user"]
    assert sent[0]["content"][0]["uuid"] == server.bodies[0]["messages"][0]["content"][0]["uuid"]
    assert server.bodies[0]["messages"][0]["content"][0]["type"] == "image_embeds"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_what_fails_has_each_ones_form(both: tuple[Served, VllmServer], path: str) -> None:
    service, server = both

    def post(content: Any, **more: Any) -> httpx.Response:
        if path == MESSAGES:
            return ask(service, path, **message(content, **more))
        return ask(service, path, input=content, **more)

    refused = post("a <|image_pad|>")
    assert refused.status_code == 400
    assert ("messages[0]" if path == MESSAGES else "input") in json.dumps(refused.json())
    assert post("a", model="another").status_code == 404
    assert not server.bodies
    for reason in ("abort", "error"):
        server.finish_reason = reason
        assert post("a").status_code == 503
    server.finish_reason = "stop"
    server.behaviours.append("400")
    assert post("a", stream=True).json()["error"]["message"].endswith("vLLM says no")
    server.behaviours.append("half")
    names = [one["type"] for one in events(post("a", stream=True))]
    assert names[-1] == ("error" if path == MESSAGES else "response.failed")
    assert post("a").status_code == 200


def test_prompts_are_counted_without_a_server(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    assert ask(service, f"{MESSAGES}/count_tokens", messages=message([source()])["messages"]).json()["input_tokens"] > 5
    assert ask(service, f"{RESPONSES}/input_tokens", input="a").json()["input_tokens"] > 1
    assert not server.bodies


NAMED = {"name": "answer", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"type": "json_schema", "schema": SCHEMA}, {"type": "json_schema", "json_schema": NAMED}),
        (
            {"type": "json_schema", "schema": SCHEMA, "name": "x"},
            {"type": "json_schema", "json_schema": NAMED | {"name": "x"}},
        ),
        ({"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "json_schema": NAMED}),
        ({"type": "json"}, {"type": "json_object"}),
        ({"type": "text"}, None),
    ],
)
def test_formats_are_those_that_vllm_enforces(
    both: tuple[Served, VllmServer], asked: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    service, server = both
    assert ask(service, RESPONSES, input="a", text={"format": asked}).status_code == 200
    assert server.bodies[0].get("response_format") == sent


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_answers_name_the_adapter(both: tuple[Served, VllmServer], path: str) -> None:
    service, _ = both
    for model in ("adapter", service.model):
        response = ask(service, path, **(message("a") if path == MESSAGES else {"input": "a"}), model=model)
        assert response.json()["model"] == model


# ── answers that aren't vLLM's ───────────────────────────────────────────────────────────────────────────────────


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason} | more]}


def piece(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


def entries(*listed: Any) -> dict[str, Any]:
    return {"logprobs": {"content": list(listed)}}


FIRST, LAST = chunk({"content": "one"}), chunk({}, "stop")
ENTRY = {"token": "é", "logprob": -1, "bytes": None, "top_logprobs": [{"token": "a", "logprob": -2.5}]}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "sent",
    [
        [],
        [FIRST],
        [FIRST, LAST, FIRST],
        [FIRST, chunk({"content": "x"}, index=1), LAST],
        [FIRST, chunk({"content": "x"}, **entries(ENTRY | {"bytes": [300]})), LAST],
        [FIRST, chunk({"content": "x"}, **entries(3)), LAST],
        [FIRST, chunk(piece(0, arguments="{}")), LAST],
        [chunk(piece(0, name="f")), chunk(piece(1, name="g")), chunk(piece(0, arguments="{}")), LAST],
        [chunk(piece(0, name="f")), FIRST, chunk(piece(0, arguments="{}")), LAST],
        [FIRST, {"error": {"message": "engine", "code": 500}}],
    ],
)
def test_answers_that_arent_whole_are_the_servers_failures(
    both: tuple[Served, VllmServer], path: str, sent: list[dict[str, Any]]
) -> None:
    service, server = both
    server.events = sent
    with service.client() as client:
        before = scrape(client)
        response = ask(service, path, **(message("a") if path == MESSAGES else {"input": "a"}), stream=True)
        if sent:
            names = [one["type"] for one in events(response)]
            assert names[-1] == ("error" if path == MESSAGES else "response.failed")
        else:
            assert response.status_code == 503
        after = scrape(client)
    failures = [one.total("request_failure_total", error="InstanceLost") for one in (before, after)]
    assert failures[1] == failures[0] + 1
    assert before.total("request_success_total") == after.total("request_success_total")


def test_what_answers_may_lack_is_filled_in(both: tuple[Served, VllmServer]) -> None:
    service, server = both
    server.events = [
        chunk({"content": "é", "tool_calls": None}, **entries(ENTRY)),
        chunk({"tool_calls": [{"index": 0}]}),
        chunk(piece(0, name="f", arguments="{")),
        chunk(piece(0, name="f", arguments="}")),
        LAST,
    ]
    asked = {"input": "a", "include": ["message.output_text.logprobs"], "stream": True}
    text, call = events(ask(service, RESPONSES, **asked))[-1]["response"]["output"]
    (entry,) = text["content"][0]["logprobs"]
    assert entry == ENTRY | {"bytes": [0xC3, 0xA9], "top_logprobs": [{"token": "a", "logprob": -2.5, "bytes": [97]}]}
    assert call["arguments"] == "{}"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_streamed_answers_that_are_kept_count_as_memory(
    both: tuple[Served, VllmServer], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, server = both
    server.events = [FIRST, *[chunk({"content": "x" * 2**16})] * 4, LAST]
    monkeypatch.setattr(service.running.frontend.api.memory_budget, "_max_bytes", 2**17)
    response = ask(service, path, **(message("a") if path == MESSAGES else {"input": "a"}), stream=True)
    assert "memory" in json.dumps(events(response)[-1])
    assert service.post(stream=True).text.endswith("[DONE]\n\n")
    wait_for(lambda: not service.running.frontend.api.memory_budget.total)
