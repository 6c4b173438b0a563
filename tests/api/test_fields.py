"""Each chat field of vLLM and SGLang: supported, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import frames_part, the_error
from tests.support.completions import answer
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.api.media_parts import LOW_DETAIL_PIXELS, MediaSettings
from triptych.api.schemas import ImagePart, ImageURL
from triptych.encode.loop import EncodeLoop
from triptych.errors import InvalidRequest
from triptych.models.text.plan import TextPlanner
from triptych.types import PixelBounds

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ ' ' + message.name if message.name }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{{ 'mood: ' + mood + '\n' if mood }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def moody(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service whose chat template reads variables."""
    copied = tmp_path_factory.mktemp("fields") / "moody"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).symlink_to(file)
    (copied / "chat_template.jinja").unlink()
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    with served(copied) as service:
        yield service


def prompt(service: Served, content: Any = "Hello", **fields: Any) -> str:
    """Return a chat's prompt as text."""
    messages = [{"role": "user", "content": content}]
    made = answer(service, "/tokenize", **({"messages": messages} | fields))
    return str(answer(service, "/detokenize", tokens=made["tokens"])["prompt"])


def rows(service: Served, part: dict[str, Any], **fields: Any) -> int:
    """Return the number of an image's tokens."""
    return prompt(service, [part], **fields).count("<|image_pad|>")


# ── the prompt ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_generation_prompt_can_be_left_out(service: Served) -> None:
    assert prompt(service).endswith("<|im_start|>assistant\n")
    assert not prompt(service, add_generation_prompt=False).endswith("<|im_start|>assistant\n")
    assert service.text(add_generation_prompt=False) != service.text()


def test_the_final_message_is_continued(service: Served) -> None:
    user, full_text = {"role": "user", "content": "Hello"}, service.text(max_tokens=16, temperature=0)
    history = [user, {"role": "assistant", "content": full_text[:1]}]
    assert prompt(service, messages=history, continue_final_message=True) == prompt(service) + full_text[:1]
    in_parts = [user, {"role": "assistant", "content": [text_part(full_text[:1])]}]
    assert prompt(service, messages=in_parts, continue_final_message=True) == prompt(service) + full_text[:1]
    on = service.text(messages=history, continue_final_message=True, max_tokens=15, temperature=0)
    assert full_text[:1] + on == full_text
    assert service.text(messages=history, max_tokens=15, temperature=0) != on


@pytest.mark.parametrize("last", [" ends with space \n", "same same", "a", "<|im_end|>x"])
def test_continuing_matches_transformers(moody: Served, folder: Path, last: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    messages = [{"role": "user", "content": "same " + last}, {"role": "assistant", "content": last}]
    expected = reference.apply_chat_template(
        messages, chat_template=TEMPLATE, continue_final_message=True, tokenize=False, add_generation_prompt=False
    )
    made = moody.running.frontend.api.prompt_builder.template.render(messages, continue_final_message=True)
    assert made == expected


def test_template_variables_that_the_template_does_not_read_are_ignored(moody: Served) -> None:
    assert prompt(moody, chat_template_kwargs={"mood": "gay"}).startswith(
        "<|im_start|>user\nHello<|im_end|>\nmood: gay"
    )
    others = ("mode", "messages", "tools", "raise_exception", "eos_token", "add_generation_prompt")
    assert prompt(moody, chat_template_kwargs=dict.fromkeys(others, "x")) == prompt(moody)
    message = the_error(moody.post(chat_template_kwargs={"mood": "<|image_pad|>"}), 400, "mood")
    assert "stands for media" in message


def test_names_are_passed_to_the_template(moody: Served) -> None:
    messages = [{"role": "user", "name": "Ann", "content": "Hi"}]
    assert prompt(moody, messages=messages).startswith("<|im_start|>user Ann\nHi")


def test_reasoning_effort_is_a_template_variable(moody: Served, service: Served) -> None:
    plain = moody.text(temperature=0)
    assert moody.text(temperature=0, reasoning_effort="high") == plain
    assert moody.text(temperature=0, reasoning_effort="none") != plain
    without = {"enable_thinking": False}
    assert moody.text(temperature=0, chat_template_kwargs=without) == moody.text(temperature=0, reasoning_effort="none")
    assert prompt(moody, chat_template_kwargs=without).endswith("<think></think>\n")
    assert service.text(reasoning_effort="none"), "a model without reasoning accepts effort none"
    the_error(service.post(reasoning_effort="low"), 400, "reasoning_effort")


# ── media ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_images_are_resized_within_the_requests_bounds(service: Served) -> None:
    part = image_part(image(256, 256))
    assert rows(service, part) == 64, "256 × 256 pixels are the model's most"
    for options in ({"max_pixels": 128 * 128}, {"size": {"shortest_edge": 1024, "longest_edge": 128 * 128}}):
        assert rows(service, part, mm_processor_kwargs=options) == 16
        small = service.text([part], mm_processor_kwargs=options, max_tokens=24)
        assert small != service.text([part], max_tokens=24)
    tiny = image_part(image(64, 64))
    assert rows(service, tiny) == 4
    assert rows(service, tiny, mm_processor_kwargs={"min_pixels": 128 * 128, "fps": 2}) == 16


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 10**6},
        {"max_pixels": 5},
        {"min_pixels": 60_000, "max_pixels": 50_000},
    ],
)
def test_invalid_bounds(service: Served, options: dict[str, int]) -> None:
    response = service.post([image_part()], mm_processor_kwargs=options)
    the_error(response, 400, "messages[0].content[0].image_url.url", "bad_media_size")
    twice = {"size": {"shortest_edge": 1024, "longest_edge": 4096}, "max_pixels": 4096}
    the_error(service.post(mm_processor_kwargs=twice), 400, "mm_processor_kwargs.size")


def test_options_that_a_model_lacks_are_refused_by_name() -> None:
    planner = TextPlanner({"model_type": "qwen3", "max_position_embeddings": 100}, {})
    MediaSettings.from_options(planner.options, {"use_audio_in_video": False, "fps": None})
    with pytest.raises(InvalidRequest, match="doesn't take fps; it takes none") as refused:
        MediaSettings.from_options(planner.options, {"fps": 1.0})
    assert refused.value.param == "mm_processor_kwargs.fps"


def test_low_detail_bounds_an_image() -> None:
    part = ImagePart(type="image_url", image_url=ImageURL(url="data:,", detail="low"))
    assert MediaSettings().bounds_of(part, LOW_DETAIL_PIXELS + 1) == PixelBounds(0, LOW_DETAIL_PIXELS)
    assert MediaSettings(PixelBounds(max_pixels=4096)).bounds_of(part, 10**6) == PixelBounds(max_pixels=4096)


def test_low_detail_does_not_exceed_the_models_bounds(service: Served) -> None:
    url = image_part(image(256, 256))["image_url"]["url"]
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for detail in ("auto", "low")]
    assert rows(service, parts[0]) == rows(service, parts[1])
    assert service.text([parts[0]]) == service.text([parts[1]])
    content = [{"type": "input_image", "image_url": url, "detail": "low"}]
    with service.client() as client:
        body = {"model": service.model, "input": [{"role": "user", "content": content}], "max_output_tokens": 2}
        assert client.post("/v1/responses", json=body).status_code == 200


def with_uuid(uuid: str, data: bytes | None = None) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": None} if data is None else image_part(data)
    return part | {"uuid": uuid}


def test_an_image_is_sent_once_and_referred_to_later(service: Served) -> None:
    first, other = image(seed=71), image(seed=72)
    expected = service.text([image_part(first), text_part("x")], max_tokens=24)
    assert service.text([with_uuid("one", first), text_part("x")], max_tokens=24) == expected
    assert service.text([with_uuid("one"), text_part("x")], max_tokens=24) == expected
    assert service.text([with_uuid("one", other), text_part("x")], max_tokens=24) != expected, "what was sent counts"
    assert service.text([with_uuid("one"), text_part("x")], max_tokens=24) != expected, "and is known by the name since"


def test_uuids_are_scoped_to_the_api_key(service: Served) -> None:
    body = service.body([with_uuid("secret", image())])
    again = service.body([text_part("see"), with_uuid("secret")])
    mine, yours = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
    with service.client() as client:
        assert client.post(CHAT, json=body, headers=mine).status_code == 200
        assert client.post(CHAT, json=again, headers=mine).status_code == 200
        for headers in (yours, {}):
            response = client.post(CHAT, json=again, headers=headers)
            the_error(response, 400, "messages[0].content[1].uuid", "unknown_media")


# ── the answer ───────────────────────────────────────────────────────────────────────────────────────────────────


# ── privacy ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_salt_keeps_media_apart_from_those_of_others(service: Served) -> None:
    """So that timing doesn't reveal whether another client sent the same image, or a clip with the same frames."""
    hosts = [host for one in service.running.instances for host in one.loops if isinstance(host, EncodeLoop)]

    def encoded() -> int:
        return sum(host.num_encoded for host in hosts)

    for part in (image_part(image(seed=4242)), frames_part(image(seed=4243), image(seed=4244))):
        for salt, more in (("", 1), ("", 0), ("a", 1), ("a", 0), ("b", 1), ("", 0)):
            before = encoded()
            service.text([part], max_tokens=1, **({"cache_salt": salt} if salt else {}))
            wait_for(service.everything_is_back)
            assert encoded() - before == more, (part["type"], salt)


def test_special_tokens_are_returned_on_request(service: Served) -> None:
    (token,) = answer(service, "/tokenize", prompt="<|vision_pad|>")["tokens"]
    settings = {"logit_bias": {str(token): 100}, "max_tokens": 3, "temperature": 0}
    assert service.text(**settings) == ""
    assert service.text(**settings, skip_special_tokens=False) == "<|vision_pad|>" * 3


def test_fields_without_effect_are_accepted(service: Served) -> None:
    neutral = {
        "user": None, "safety_identifier": "s", "session_id": "1", "service_tier": "flex", "priority": 0, "store": True,
        "modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "none", "tools": None, "ignore_eos": None,
        "metadata": {"task": "7"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "best_of": 1,
        "verbosity": "medium", "use_beam_search": False, "prediction": {"type": "content", "content": "x"},
        "repeat_penalty": 1.0, "unheard_of": None, "x_mine": [1], "do_sample": True, "guided_json": None,
    }  # fmt: skip
    assert service.text(**neutral | {"ignore_eos": True}) == service.text()


@pytest.mark.parametrize(
    "null", ["min_p", "repetition_penalty", "min_tokens", "stream", "seed", "stop", "n", "logit_bias"]
)
def test_null_equals_an_absent_field(service: Served, null: str) -> None:
    assert service.text(**{null: None}) == service.text()


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by_header", [False, True])
def test_a_request_ends_at_its_deadline(service: Served, by_header: bool) -> None:
    service.steps.delay = 0.02
    body = service.body(max_tokens=3000) | ({} if by_header else {"timeout": 0.3})
    with service.client() as client:
        response = client.post(CHAT, json=body, headers={"X-Request-Timeout": "0.3"} if by_header else {})
        the_error(response, 504, None, "deadline_exceeded")
        wait_for(service.everything_is_back)
        service.steps.delay = 0.0
        assert client.post(CHAT, json=service.body(timeout=20)).status_code == 200


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf", "1e9", ""])
def test_an_invalid_timeout_header(service: Served, given: str) -> None:
    with service.client() as client:
        the_error(client.post(CHAT, json=service.body(), headers={"X-Request-Timeout": given}), 400)


def test_an_image_that_is_too_late_is_not_encoded(service: Served) -> None:
    service.encoder.close()
    service.post([image_part(image(seed=701))], timeout=0.2)
    service.post([image_part(image(seed=702))], timeout=0.2)  # waits behind the one that the tower stands still at
    service.encoder.opened.set()
    wait_for(service.everything_is_back)


def test_a_stream_past_its_deadline_ends_with_an_error(service: Served) -> None:
    service.steps.delay = 0.02
    lines = service.post(max_tokens=3000, timeout=0.5, stream=True).text.split("\n")
    payloads = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert payloads[-1]["error"]["code"] == "deadline_exceeded"
    assert len(payloads) > 1


def test_an_instance_ends_late_requests_by_itself(service: Served) -> None:
    """Even if the frontend doesn't cancel them."""
    host = service.running.engine_loops()[0]
    frontend = service.running.frontend
    service.steps.delay = 0.02
    tick, frontend.router.tick = frontend.router.tick, lambda: None  # type: ignore[method-assign]
    try:
        the_error(service.post(max_tokens=3000, timeout=0.3), 504, None, "deadline_exceeded")
    finally:
        frontend.router.tick = tick  # type: ignore[method-assign]
    wait_for(lambda: not len(host.scheduler))
