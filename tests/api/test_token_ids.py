"""vLLM's fields about the tokens of an answer, and what ended it."""

import json
from typing import Any

import pytest

from tests.support.chat import events, streamed_text
from tests.support.completions import answer, post
from tests.support.reasoning import thinking_service
from tests.support.serving import Served
from tests.support.tools import FREE, THINKING

IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}


def chunks_of(service: Served, **fields: Any) -> list[Any]:
    *lines, done = filter(None, post(service, stream=True, **fields).text.split("\n"))
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def named(choice: dict[str, Any]) -> list[str]:
    return [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_chats_token_ids_are_its_prompt_and_its_answer(service: Served) -> None:
    fields = {**IDS, "logprobs": True, "max_tokens": 12}
    body = service.body("Hello", **fields)
    whole = service.post("Hello", **fields).json()
    (choice,) = whole["choices"]
    assert whole["prompt_token_ids"] == answer(service, "/tokenize", messages=body["messages"])["tokens"]
    assert len(choice["token_ids"]) == 12
    assert [one["token"] for one in choice["logprobs"]["content"]] == named(choice)
    chunks = events(service, body)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for one in chunks for token in one["choices"][0]["token_ids"]] == choice["token_ids"]
    text = service.running.frontend.api.tokenizer.decode(choice["token_ids"])
    assert text == choice["message"]["content"] == streamed_text(chunks)


def test_a_completions_token_ids_are_its_prompt_and_its_answer(service: Served) -> None:
    fields = {**IDS, "prompt": "Hello", "logprobs": 1, "max_tokens": 12}
    (choice,) = answer(service, **fields)["choices"]
    assert choice["prompt_token_ids"] == answer(service, "/tokenize", prompt="Hello")["tokens"]
    assert len(choice["token_ids"]) == 12
    assert choice["logprobs"]["tokens"] == named(choice)
    chunks = [one["choices"][0] for one in chunks_of(service, **fields)]
    assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in one for one in chunks[1:])
    assert [token for one in chunks for token in one["token_ids"]] == choice["token_ids"]
    assert [token for one in chunks for token in one["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_completions_hidden_tokens_have_no_chunk(service: Served) -> None:
    """They come with the next one."""
    tokenizer = service.running.frontend.api.tokenizer
    hidden = min(tokenizer.special_ids - tokenizer.eos_token_ids)
    fields = {**IDS, "prompt": "Hello", "max_tokens": 12, "temperature": 1.0, "seed": 2, "top_k": 20}
    chunks = [one["choices"][0] for one in chunks_of(service, **fields, logit_bias={str(hidden): 12})]
    tokens = [token for one in chunks for token in one["token_ids"]]
    assert len(tokens) == 12
    assert hidden in tokens
    assert all(one["text"] for one in chunks[:-1])


@pytest.mark.parametrize("stop", [[], ["x"], "token"])
def test_what_ended_an_answer_is_named(service: Served, stop: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    token = service.running.frontend.api.tokenizer.encode("x")[0]
    fields["logit_bias"] = {str(token): 100}
    fields |= {"stop_token_ids": [token]} if stop == "token" else {"stop": stop}
    expected = token if stop == "token" else (stop or [None])[0]
    response = service.post("Hello", **fields)
    assert response.status_code == 200, response.text
    chat = response.json()["choices"][0]
    completion = answer(service, prompt="Hello", **fields)["choices"][0]
    assert (chat["stop_reason"], completion["stop_reason"]) == (expected, expected)
    assert chat["finish_reason"] == ("stop" if expected else "length")
    last = events(service, service.body("Hello", **fields))[-1]["choices"][0]
    assert (
        last["stop_reason"] == chunks_of(service, prompt="Hello", **fields)[-1]["choices"][0]["stop_reason"] == expected
    )


def test_reasoning_is_left_out_on_request(tmp_path: Any) -> None:
    with thinking_service(tmp_path / "thinker") as thinker:
        fields = FREE | THINKING | {"max_tokens": 60, "seed": 1, "ignore_eos": True}
        shown = thinker.post(**fields).json()
        left_out = thinker.post(**fields, include_reasoning=False).json()
        assert shown["choices"][0]["message"].pop("reasoning")
        shown["choices"][0]["message"].pop("reasoning_content")
        assert left_out["choices"] == shown["choices"]
        assert left_out["usage"]["completion_tokens_details"] == shown["usage"]["completion_tokens_details"]
        for chunk in events(thinker, thinker.body(**fields, include_reasoning=False)):
            assert not {"reasoning", "reasoning_content"} & chunk["choices"][0]["delta"].keys()
