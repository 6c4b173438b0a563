"""Successful chat completions: text and images, streamed or not, over plain HTTP and with OpenAI's client."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.chat import events, streamed_text, the_error
from tests.support.serving import CHAT, Served, image, image_part, text_part, wait_for

TWO_IMAGES = [image_part(image(seed=1)), text_part("and"), image_part(image(64, 160, 2)), text_part("differ how?")]


@pytest.mark.parametrize("content", ["Hello", [text_part("Hello")], TWO_IMAGES], ids=["text", "part", "images"])
def test_the_answer_and_its_stream_are_equal(service: Served, content: Any) -> None:
    body = service.body(content, max_tokens=24)
    answer = service.post(content, max_tokens=24).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == service.model
    (choice,) = answer["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24

    chunks = events(service, body | {"stream_options": {"include_usage": True}})
    assert streamed_text(chunks) == choice["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    *_, last, with_usage = chunks
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["delta"]["content"], "the last text comes with the reason"
    assert with_usage["choices"] == []
    cached = with_usage["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] <= cached < usage["prompt_tokens"]
    assert with_usage["usage"] == usage


def test_usage_is_streamed_only_when_asked_for(service: Served) -> None:
    assert all("usage" not in chunk for chunk in events(service, service.body()))


def test_every_image_counts_where_it_stands(service: Served) -> None:
    one, other = image_part(image(seed=1)), image_part(image(seed=2))
    contents = [[one, other], [other, one], [one, text_part("x"), other], [one], [text_part("x")]]
    assert len({service.text(content, max_tokens=24) for content in contents}) == len(contents)


def test_a_conversation_with_all_roles(service: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part(), text_part("What is it?")], "name": "someone"},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": [text_part("And this?"), image_part(image(seed=5))]},
    ]
    full_text = service.text(messages=messages)
    assert full_text != service.text(messages=messages[1:])
    developer = [{"role": "developer", "content": "Be brief."}, *messages[1:]]
    assert service.text(messages=developer) == full_text


def test_the_same_seed_gives_the_same_answer(service: Served) -> None:
    answers = [service.text(temperature=1.5, seed=seed, max_tokens=24) for seed in (7, 7, 8, -7)]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3
    assert len({service.text(temperature=2.0, max_tokens=24) for _ in range(3)}) == 3, "no seed: another one each time"


def test_max_completion_tokens_takes_precedence(service: Served) -> None:
    answer = service.post(max_tokens=9, max_completion_tokens=5).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_the_answer_ends_before_a_stop_string_that_spans_tokens(service: Served) -> None:
    whole = service.text(max_tokens=60)
    stop = next(whole[at : at + 3] for at in range(4, 40) if whole.find(whole[at : at + 3]) == at)
    expected = whole[: whole.index(stop)]
    for settings in ({"stop": stop}, {"stop": ["never said", stop]}):
        answer = service.post(max_tokens=60, **settings).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 60
    chunks = events(service, service.body(max_tokens=60, stop=stop))
    assert streamed_text(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_half_a_stop_string_is_part_of_the_answer(service: Served) -> None:
    whole = service.text(max_tokens=20)
    chunks = events(service, service.body(max_tokens=20, stop=whole[-1] + "never said"))
    assert streamed_text(chunks) == whole


def test_stop_ids_end_the_answer(service: Served) -> None:
    tokenizer = service.running.frontend.api.tokenizer
    whole = service.text(max_tokens=40)
    stop = next(letter for letter in whole if letter.isascii() and letter.isalpha())
    expected = whole[: whole.index(stop)]
    settings = {"max_tokens": 40, "stop_token_ids": tokenizer.encode(stop)}
    answer = service.post(**settings).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == tokenizer.encode(stop)[0]
    assert answer["choices"][0]["message"]["content"] == expected, "without the token that ended it"
    chunks = events(service, service.body(**settings, stream_options={"include_usage": True}))
    assert streamed_text(chunks) == expected
    # which counts all the same: every token of this tokenizer is a byte
    assert chunks[-1]["usage"] == answer["usage"]


def test_the_end_token_ends_the_answer_unless_ignored(service: Served) -> None:
    """A random model generates its end token soon enough with some seed."""
    ended = (service.post(temperature=2.0, seed=s, max_tokens=60, ignore_eos=False).json() for s in range(60))
    finished = next(answer for answer in ended if answer["choices"][0]["finish_reason"] == "stop")
    assert finished["usage"]["completion_tokens"] < 60
    assert "<|" not in finished["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_timeline_is_sent_if_the_header_requests_it(service: Served, stream: bool) -> None:
    body = service.body(
        [image_part(image(seed=stream + 10))], **({"stream_options": {"include_usage": True}} if stream else {})
    )
    header = {"X-Triptych-Timeline": "true"}
    if stream:
        answers = events(service, body, header)
        assert all("timeline" not in chunk for chunk in answers[:-1])
        assert "timeline" not in events(service, body)[-1]
    else:
        with service.client() as client:
            answers = [client.post(CHAT, json=body, headers=header).json()]
            assert "timeline" not in client.post(CHAT, json=body).json()
    timeline = answers[-1]["timeline"]
    stages = {row["stage"] for row in timeline}
    assert {"fetch", "plan", "preprocess", "encode", "transfer", "prefill", "decode"} <= stages
    assert all(0 <= row["start_ms"] <= row["end_ms"] for row in timeline)


def test_openais_client_works_unchanged(service: Served) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)
    with client:
        assert [model.id for model in client.models.list()] == [service.model]
        messages: Any = [{"role": "user", "content": TWO_IMAGES}]
        answer = client.chat.completions.create(model=service.model, messages=messages, max_tokens=16, temperature=0)
        stream = client.chat.completions.create(
            model=service.model,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        full_text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert full_text == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="gpt-4o", messages=messages)
        assert unknown.value.param == "model"
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=service.model, messages=messages, temperature=3)


def test_models_health_and_ready(service: Served) -> None:
    with service.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (service.model, "model", 4096)
        assert client.get("/health").status_code == 200
        wait_for(lambda: client.get("/ready").json() == {"ready": True})
        assert client.get("/ready").status_code == 200
        assert client.get(f"/v1/models/{service.model}").json() == model
        assert client.get("/v1/models/").status_code in (200, 307)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as openais:
        assert openais.models.retrieve(service.model).id == service.model
        with pytest.raises(openai.NotFoundError):
            openais.models.retrieve("another")


def test_endpoints_with_get_answer_head(service: Served) -> None:
    with service.client() as client:
        wait_for(lambda: client.get("/ready").status_code == 200)
        for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", f"/v1/models/{service.model}", "/docs"):
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        assert client.head("/v1/models/another").status_code == 404
        assert client.head(CHAT).status_code == 405


def test_several_choices_equal_separate_requests(service: Served) -> None:
    settings = {"temperature": 1.0, "max_tokens": 12}
    choices = service.post(TWO_IMAGES, n=3, seed=5, **settings).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 3
    assert texts == [service.text(TWO_IMAGES, seed=5 + number, **settings) for number in range(3)]

    streamed = ["", "", ""]
    reasons: list[tuple[int, str]] = []
    usages = []
    body = service.body(TWO_IMAGES, n=3, seed=5, **settings, stream_options={"include_usage": True})
    for chunk in events(service, body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                reasons.append((choice["index"], choice["finish_reason"]))
        usages += [chunk["usage"]] if "usage" in chunk else []
    assert streamed == texts
    assert sorted(reasons) == [(0, "length"), (1, "length"), (2, "length")]
    assert [usage["completion_tokens"] for usage in usages] == [36]


def test_logprobs_are_those_of_greedy_sampling(service: Served) -> None:
    settings = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "temperature": 0}
    (choice,) = service.post("Hello", **settings).json()["choices"]
    content = choice["logprobs"]["content"]
    full_text = bytes(byte for entry in content for byte in entry["bytes"])
    assert full_text.decode(errors="replace") == choice["message"]["content"]
    for entry in content:
        best, *others = entry["top_logprobs"]
        assert (best["token"], best["logprob"]) == (entry["token"], entry["logprob"])
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert [other["logprob"] for other in others] == sorted((o["logprob"] for o in others), reverse=True)
        assert best["logprob"] >= others[0]["logprob"]
    chunks = events(service, service.body("Hello", **settings))
    streamed = [
        entry for c in chunks for one in c["choices"] if one["logprobs"] for entry in one["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert service.post("Hello", max_tokens=2).json()["choices"][0]["logprobs"] is None


def test_a_bias_and_a_minimum_length_are_honoured(service: Served) -> None:
    plain = service.post("Hello", max_tokens=3, temperature=0, logprobs=True).json()
    first = plain["choices"][0]["logprobs"]["content"][0]["token"]
    (token,) = service.running.frontend.api.tokenizer.encode(first)
    ended = service.post("Hello", max_tokens=8, temperature=0, stop_token_ids=[token]).json()
    assert (ended["choices"][0]["message"]["content"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    longer = service.post("Hello", max_tokens=8, temperature=0, stop_token_ids=[token], min_tokens=4).json()
    assert longer["usage"]["completion_tokens"] >= 4
    banned = service.text("Hello", max_tokens=3, temperature=0, logit_bias={str(token): -100})
    assert not banned.startswith(first)


def formatted(service: Served, content: Any = "Hello", **settings: Any) -> str:
    """An answer that only the grammar ends, because the model's weights are random."""
    answer = service.post(content, **({"max_tokens": 300, "temperature": 1.0, "ignore_eos": False} | settings)).json()
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return answer["choices"][0]["message"]["content"]


SCHEMA = {
    "type": "object",
    "properties": {"seen": {"type": "boolean"}, "shape": {"enum": ["círcle", "square"]}, "size": {"enum": [1, 22]}},
    "required": ["seen", "shape", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("content", ["Hello", TWO_IMAGES], ids=["text", "images"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_matches_its_json_schema(service: Served, content: Any, ignore_eos: bool) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "what", "schema": SCHEMA}}
    answers = [
        json.loads(formatted(service, content, response_format=response_format, seed=seed, ignore_eos=ignore_eos))
        for seed in range(3)
    ]
    for answer in answers:
        assert list(answer) == ["seen", "shape", "size"]
        assert answer["shape"] in ("círcle", "square")
        assert answer["size"] in (1, 22)
    again = formatted(service, content, structured_outputs={"json": SCHEMA}, seed=0, ignore_eos=ignore_eos)
    assert json.loads(again) == answers[0]


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]"}, r"[ab]{3}-[0-9]"),
        ({"choice": ["yes", 'a "quoted" one', "näh\n"]}, 'yes|a "quoted" one|näh\n'),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    ],
)
def test_an_answer_matches_its_regex_choice_or_grammar(service: Served, wanted: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        assert re.fullmatch(pattern, formatted(service, structured_outputs=wanted, seed=seed))


def test_grammars_and_free_text_share_a_batch(service: Served) -> None:
    free = {"temperature": 1.0, "seed": 3, "max_tokens": 16}
    alone = service.text("Hello", **free)
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(service.text, "Hello", **free) for _ in range(2)]
        numbers = [pool.submit(formatted, service, structured_outputs={"regex": "[0-9]{12}"}) for _ in range(2)]
        assert {text.result() for text in texts} == {alone}
        assert all(re.fullmatch("[0-9]{12}", number.result()) for number in numbers)


NO_TYPE = {"name": "x", "schema": {"type": "no such type"}}


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NO_TYPE}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": "{not json"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= other"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_grammar_is_refused(service: Served, settings: dict[str, Any], param: str, stream: bool) -> None:
    the_error(service.post("Hello", stream=stream, **settings), 400, param)
    assert service.text("Hello", max_tokens=2)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_lengths_and_tokens_beyond_the_model_are_refused(
    service: Served, settings: dict[str, Any], param: str | None
) -> None:
    answer = service.post("Hello", max_tokens=8, **settings)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert service.text("Hello", max_tokens=2)
