"""``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.support.chat import the_error
from tests.support.completions import COMPLETIONS, answer, post
from tests.support.serving import CHAT, Served, image_part, text_part
from triptych.api.prompt_logprobs import MAX_PROMPT_LOGPROBS


def texts(service: Served, **fields: Any) -> list[str]:
    return [choice["text"] for choice in answer(service, **fields)["choices"]]


def streamed(service: Served, **fields: Any) -> list[Any]:
    response = post(service, stream=True, **fields)
    assert response.status_code == 200, response.text
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_text_and_its_tokens_have_the_same_answer(service: Served) -> None:
    tokens = answer(service, "/tokenize", prompt="Once upon")["tokens"]
    (text,) = texts(service, prompt="Once upon")
    assert text
    assert texts(service, prompt=["Once upon", "a time"])[0] == text
    assert texts(service, prompt=tokens) == [text]
    assert texts(service, prompt=[tokens, tokens]) == [text, text]
    assert texts(service, prompt="Once upon", echo=True) == ["Once upon" + text]
    # the same tokens as a chat's are answered as the chat is
    messages = [{"role": "user", "content": "Hello"}]
    chat = answer(service, "/tokenize", messages=messages)["tokens"]
    assert texts(service, prompt=chat) == [service.text("Hello")]


def test_choices_are_numbered_prompt_by_prompt(service: Served) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    made = answer(service, prompt=["a", "b"], n=2, **settings)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert made["usage"]["completion_tokens"] == 32
    alone = [texts(service, prompt=prompt, n=2, **settings) for prompt in ("a", "b")]
    assert [choice["text"] for choice in made["choices"]] == alone[0] + alone[1]


def test_the_stream_equals_the_answer(service: Served) -> None:
    fields: dict[str, Any] = {"prompt": ["Once", "Twice"], "echo": True, "max_tokens": 20, "stop": "\n"}
    whole = answer(service, **fields)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = streamed(service, **fields, stream_options=options)
    full_text = ["", ""]
    reasons: list[Any] = [None, None]
    for event in events:
        (choice,) = event["choices"]
        full_text[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert full_text == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]


def test_logprobs_have_an_entry_for_each_token(service: Served) -> None:
    whole = answer(service, prompt="Once", logprobs=2, temperature=0)["choices"][0]
    logprobs = whole["logprobs"]
    assert len(logprobs["tokens"]) == 8
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or whole["text"].startswith(token, offset)
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values()), "greedy"
    parts = [event["choices"][0]["logprobs"] for event in streamed(service, prompt="Once", logprobs=2, temperature=0)]
    for name in logprobs:
        assert [entry for part in parts for entry in part[name]] == logprobs[name]
    none = answer(service, prompt="Once", logprobs=0)["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in none["top_logprobs"])


def test_offsets_count_characters_of_the_text(service: Served) -> None:
    """A character of several tokens counts once, and its tokens have its offset."""
    text = "héllo 🎉 世"
    cases: list[dict[str, Any]] = [{"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 3, "temperature": 0}]
    for fields in cases:
        choice = answer(service, prompt=text, logprobs=0, **fields)["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        own = [at for at in offsets if at < len(text)]
        assert sorted(set(own)) == list(range(len(text))), "this tokenizer has a token for each byte"
        assert len(own) == len(text.encode())
        assert all(at >= len(text) for at in offsets[len(own) :])
        assert choice["text"].startswith(text)


def test_echo_returns_the_prompt_with_its_logprobs(service: Served) -> None:
    """As evaluation harnesses request them."""
    fields: dict[str, Any] = {"prompt": ["Once <|im_start|>upon", "Größe"], "logprobs": 2, "temperature": 0}
    plain = answer(service, **fields)
    echoed = answer(service, **fields, echo=True)
    for choice, without, prompt in zip(echoed["choices"], plain["choices"], fields["prompt"], strict=True):
        spelled = answer(service, "/tokenize", prompt=prompt)
        count = spelled["count"]
        logprobs, own = choice["logprobs"], without["logprobs"]
        assert choice["text"] == prompt + without["text"]
        assert len(logprobs["tokens"]) == count + 8
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert "".join(logprobs["tokens"][:count]) == prompt or "\ufffd" in "".join(logprobs["tokens"])
        entries = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
        for token, logprob, top in entries[1:]:
            assert logprob <= top[token] <= max(top.values()) <= 0
            assert top[token] == logprob or token == "\ufffd", "of those that are spelled alike, the likeliest"
            assert 1 <= len(top) <= 3
        assert logprobs["tokens"][count:] == own["tokens"]
        assert logprobs["token_logprobs"][count:] == pytest.approx(own["token_logprobs"], abs=1e-4)
        first, *offsets = logprobs["text_offset"]
        assert first == own["text_offset"][0] == 0
        assert offsets[count - 1 :] == [offsets[count - 1] + offset for offset in own["text_offset"]]
        assert offsets[count - 1] == len(choice["text"]) - len(without["text"]) or "\ufffd" in logprobs["tokens"]
    parts = streamed(service, **fields, echo=True)
    for choice in echoed["choices"]:
        mine = [event["choices"][0] for event in parts if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [token for one in mine for token in one["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        offsets = [offset for one in mine for offset in one["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


def test_the_prompt_alone(service: Served) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "logprobs": 1, "echo": True, "temperature": 0}
    count = answer(service, "/tokenize", prompt=fields["prompt"])["count"]
    alone, with_more = answer(service, **fields, max_tokens=0), answer(service, **fields)
    (choice,) = alone["choices"]
    assert choice["text"] == fields["prompt"]
    assert choice["finish_reason"] == "length"
    for name in ("tokens", "text_offset"):
        assert choice["logprobs"][name] == with_more["choices"][0]["logprobs"][name][:count]
    assert alone["usage"]["completion_tokens"] == 0
    (event,) = streamed(service, **fields, max_tokens=0)
    assert event["choices"][0]["text"] == fields["prompt"]
    one_token = answer(service, prompt=[5], logprobs=1, echo=True, max_tokens=0, prompt_logprobs=1)["choices"][0]
    assert one_token["logprobs"]["token_logprobs"] == one_token["prompt_logprobs"] == [None]


def test_prompt_logprobs_in_vllms_format(service: Served) -> None:
    fields: dict[str, Any] = {"prompt": ["Once upon", "a time"], "prompt_logprobs": 2, "temperature": 0}
    made = answer(service, **fields)
    echoed = answer(service, **fields, echo=True, logprobs=5)
    for choice, other, prompt in zip(made["choices"], echoed["choices"], fields["prompt"], strict=True):
        tokens = answer(service, "/tokenize", prompt=prompt)["tokens"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == len(tokens) - 1
        assert choice["logprobs"] is None
        for n, (token, entry) in enumerate(zip(tokens[1:], others, strict=True), start=1):
            own = entry[str(token)]
            assert own["logprob"] == pytest.approx(other["logprobs"]["token_logprobs"][n], abs=1e-4)
            assert own["decoded_token"] == other["logprobs"]["tokens"][n]
            likeliest = [one for one in entry.values() if one["rank"] <= 2]
            assert [one["rank"] for one in sorted(likeliest, key=lambda one: -one["logprob"])] == [1, 2]
            assert len(entry) == (2 if own["rank"] <= 2 else 3)
            assert len(other["prompt_logprobs"][n]) == len(entry), "each choice has the number that it requested"


def test_prompt_logprobs_of_a_chat_with_a_picture(service: Served) -> None:
    content = [image_part(), text_part("What is it?")]
    made = service.post(content, prompt_logprobs=1, n=2, temperature=0).json()
    tokens = answer(service, "/tokenize", messages=[{"role": "user", "content": content}])["tokens"]
    assert len(made["choices"]) == 2
    assert [entry and str(token) in entry for token, entry in zip(tokens, made["prompt_logprobs"], strict=True)] == [
        None,
        *[True] * (len(tokens) - 1),
    ]
    assert service.post(content).json()["prompt_logprobs"] is None


def test_formatting_uses_no_thread_of_media_decoding(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those threads are few and shared, and serve in order of arrival."""

    def taken(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(asyncio, "to_thread", taken)
    assert streamed(service, prompt="x")
    assert streamed(service, prompt="x", echo=True, logprobs=1)
    assert texts(service, prompt="x", prompt_logprobs=1)
    assert service.post("x", prompt_logprobs=1).status_code == 200


def test_a_chats_prompt_is_scored_once_whatever_the_number_of_choices(service: Served) -> None:
    made = service.post("a" * 900, prompt_logprobs=20, n=8, max_tokens=1)
    assert made.status_code == 200, made.text
    num_prompt = made.json()["usage"]["prompt_tokens"]
    assert len(made.json()["choices"]) == 8
    assert len(made.json()["prompt_logprobs"]) == num_prompt
    assert num_prompt * 21 < MAX_PROMPT_LOGPROBS < num_prompt * 21 * 8
    fields: dict[str, Any] = {"prompt": [[5] * 900], "prompt_logprobs": 20, "n": 8, "max_tokens": 1}
    the_error(post(service, **fields), 400, "prompt_logprobs")  # each choice would have them


@pytest.mark.parametrize(
    ("fields", "param", "expected_message"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": 3}, "prompt", "token ids"),
        ({"prompt": ["x", 3]}, "prompt[1]", "string"),
        ({"prompt": [3, "x"]}, "prompt[1]", "integer"),
        ({"prompt": [[1], []]}, "prompt[1]", "no tokens"),
        ({"prompt": [-1]}, "prompt[0]", "greater"),
        ({"prompt": ["x", "see <|image_pad|>"]}, "prompt[1]", "<|image_pad|>"),
        ({"prompt": "x" * 5000}, "prompt", "tokens"),
        ({"prompt": "x", "max_tokens": 4096}, "max_tokens", "context"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "best_of": 2}, "best_of", "must equal n"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "greater"),
        ({"prompt": "x", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream: true"),
        ({"prompt": [[5] * 1000] * 10, "prompt_logprobs": 20}, "prompt_logprobs", "210000"),
        ({"prompt": [[5] * 1000] * 5, "n": 2, "echo": True, "logprobs": 20}, "echo", "limit of 131072"),
        ({"prompt": ["x"] * 100, "n": 64}, "prompt", "6400"),
        ({"prompt": "x", "messages": [{}]}, "messages", "unknown"),
        ({"prompt": "x", "tools": [{}]}, "tools", "unknown"),
    ],
)
def test_invalid_completion_requests(
    service: Served, fields: dict[str, Any], param: str, expected_message: str
) -> None:
    assert expected_message.lower() in the_error(post(service, **fields), 400, param).lower()


def test_tokens_outside_the_vocabulary(service: Served) -> None:
    for fields, param in (
        ({"prompt": [2**30]}, "prompt"),
        ({"prompt": "x", "stop_token_ids": [5, 2**30]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
    ):
        assert "out of vocabulary" in the_error(post(service, **fields), 400, param)
    media = answer(service, "/tokenize", messages=[{"role": "user", "content": [image_part()]}])["tokens"]
    assert "stands for media" in the_error(post(service, prompt=media), 400, "prompt")


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_are_inverse(service: Served, prefix: str) -> None:
    text = "Größe <|im_start|> 🙂"
    made = answer(service, f"{prefix}/tokenize", prompt=text, return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert "<|im_start|>" in made["token_strs"]
    assert made["max_model_len"] == 4096
    assert answer(service, f"{prefix}/detokenize", tokens=made["tokens"]) == {"prompt": text}
    with service.client() as client:  # the model needn't be named
        assert client.post(f"{prefix}/tokenize", json={"prompt": text}).json()["tokens"] == made["tokens"]


def test_a_tokenized_conversation_is_its_prompt(service: Served) -> None:
    content = [image_part(), text_part("What is it?")]
    messages = [{"role": "user", "content": content}]
    made = answer(service, "/tokenize", messages=messages)
    assert made["count"] == service.post(content).json()["usage"]["prompt_tokens"]
    assert answer(service, "/tokenize", messages=messages, add_generation_prompt=False)["count"] < made["count"]
    assert made["token_strs"] is None


def test_invalid_tokenize_requests(service: Served) -> None:
    the_error(post(service, "/tokenize", prompt=3), 400, "prompt")
    the_error(post(service, "/tokenize", model="other", prompt="x"), 404, "model")
    the_error(post(service, "/tokenize", messages=[]), 400, "messages")
    the_error(post(service, "/detokenize", tokens=["x"]), 400, "tokens[0]")
    the_error(post(service, "/detokenize", tokens=[2**31]), 400, "tokens[0]")
    assert answer(service, "/detokenize", tokens=[2**31 - 1]) == {"prompt": ""}


def test_openais_client_completes(service: Served) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        made = client.completions.create(model=service.model, prompt="Once", max_tokens=6, temperature=0, logprobs=1)
        stream = client.completions.create(model=service.model, prompt="Once", max_tokens=6, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == made.choices[0].text
        assert made.choices[0].logprobs is not None


def test_the_version_is_returned(service: Served) -> None:
    with service.client() as client:
        assert client.get("/version").json()["version"]
        document = client.get("/openapi.json").json()
    paths = {CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/version", "/v1/models", "/health", "/ready"}
    assert paths <= set(document["paths"])
