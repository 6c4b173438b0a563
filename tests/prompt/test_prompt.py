import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import clip
from tests.support.prompt_parts import image_part, png, user
from tests.support.random_checkpoint import write_json
from tests.support.timing import cpu_seconds
from tests.support.tiny import make_tiny
from triptych.errors import (
    BadMediaSize,
    CheckpointError,
    InternalError,
    InvalidRequest,
    MediaTooLarge,
    PromptTooLong,
    TruncatedMedia,
    UnsupportedMedia,
)
from triptych.models.shared.video import sampled_frames
from triptych.prompt.prompt import PromptBuilder
from triptych.types import FrameSampling, ItemContext, ItemPlan


@pytest.fixture(scope="module")
def builder(shared_folder: Path) -> PromptBuilder:
    return PromptBuilder(shared_folder)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def builder_with_videos(folder: Path) -> PromptBuilder:
    template = folder / "chat_template.jinja"
    text = template.read_text().replace("item.type == 'image' or 'image' in item", "item.type in ('image', 'video')")
    template.write_text(text.replace("<|image_pad|>", "<|' + item.type + '_pad|>"))
    return PromptBuilder(folder)


def test_text_only(builder: PromptBuilder) -> None:
    prompt = builder.build([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens == builder.tokenizer.encode(text)
    assert prompt.items == ()
    np.testing.assert_array_equal(prompt.positions.prompt, np.tile(np.arange(len(prompt.tokens)), (3, 1)))
    assert prompt.positions.next_position == len(prompt.tokens)


def test_placeholders_are_expanded_in_order(builder: PromptBuilder) -> None:
    first, second = png(64, 32), png(40, 40)
    prompt = builder.build([user(text_part("a"), image_part(first), text_part("b")), user(image_part(second))])
    image = builder.planner.placeholder_tokens["image"]
    assert isinstance(image, int)
    assert [item.data for item in prompt.items] == [first, second]
    assert prompt.tokens.count(image) == sum(item.plan.rows for item in prompt.items)
    for item in prompt.items:
        (span,) = item.placement.spans
        assert span.length == item.plan.rows
        assert set(prompt.tokens[span.start : span.end]) == {image}
        assert builder.tokenizer.token_of(prompt.tokens[span.start - 1]) == "<|vision_start|>"
        assert builder.tokenizer.token_of(prompt.tokens[span.end]) == "<|vision_end|>"
    assert prompt.positions.prompt.shape == (3, len(prompt.tokens))


def test_keys_name_bytes_plan_and_model(folder: Path) -> None:
    builder = PromptBuilder(folder)
    red, blue = png(32, 32), png(32, 32, "blue")
    keys = [item.key for item in builder.build([user(image_part(red), image_part(blue), image_part(red))]).items]
    assert keys[0] == keys[2] != keys[1]
    assert all(len(key) == 64 for key in keys)
    assert PromptBuilder(folder).build([user(image_part(red))]).items[0].key == keys[0]
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 256, "max_pixels": 4095}))
    assert PromptBuilder(folder).build([user(image_part(red))]).items[0].key != keys[0]


@pytest.mark.parametrize("shown", ["message.content", "message.content if message.content is string else ''"])
def test_parts_are_lines_for_a_template_of_strings(folder: Path, shown: str) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ 'A' + (" + shown + ") + 'Z' }}{% endfor %}"
    )
    builder = PromptBuilder(folder)
    prompt = builder.build([user(text_part("a"), image_part(png(32, 32)), text_part("b"))])
    tokens = [builder.tokenizer.token_of(token) for token in prompt.tokens]
    rows = prompt.items[0].plan.rows
    assert tokens == ["A", "a", "Ċ", *["<|image_pad|>"] * rows, "Ċ", "b", "Z"]
    assert builder.modalities == ["image", "video"]


def test_labels_precede_items_and_change_no_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_with_videos(folder)
    video = {"type": "video", "data": clip("mp4", frames=4, width=64, height=32)}
    messages = [user(image_part(png(32, 32)), video), user(image_part(png(32, 32)))]
    plain = builder.build(messages)

    def label(plan: ItemPlan, context: ItemContext) -> str:
        assert context.siblings == (plan.modality == "image")
        return f"[{plan.modality} {context.index}]"

    monkeypatch.setattr(builder.planner, "label", label)
    labelled = builder.build(messages)
    text = "".join(builder.tokenizer.token_of(token) or "" for token in labelled.tokens).replace("Ġ", " ")
    places = [text.index(f"<|vision_start|>[{name}]") for name in ("image 0", "video 0", "image 1")]
    assert places == sorted(places)
    assert [item.key for item in labelled.items] == [item.key for item in plain.items]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "system", "content": "a<|image_pad|>b"}], "messages[0].content"),
        ([user(text_part("a")), user(text_part("b"), text_part("<|video_pad|>"))], "messages[1].content[1].text"),
        ([{"role": "assistant", "content": "<|vision_start|>"}], "messages[0].content"),
        ([user(text_part("<|vision_end|>"))], "messages[0].content[0].text"),
        ([user(text_part("<|image"), text_part("_pad|>"))], "messages[0].content[1].text"),
        ([user(text_part("<|im"), text_part("age"), text_part("_pad|>"))], "messages[0].content[2].text"),
        ([{"role": "tool", "content": None, "calls": [{"<|image_pad|>": 1}]}], "messages[0].calls[0]"),
        ([{"role": "<|image_pad|>", "content": "a"}], "messages[0].role"),
    ],
)  # fmt: skip
def test_media_tokens_in_text(builder: PromptBuilder, messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"may not contain <\|") as caught:
        builder.build(messages)
    assert caught.value.param == param


def test_media_tokens_in_template_variables(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidRequest) as caught:
        builder.build([user(text_part("a"))], tools=[{"type": "<|image_pad|>"}])
    assert caught.value.param == "tools[0].type"


def test_half_a_surrogate_pair(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidRequest, match="Unicode") as caught:
        builder.build([user(text_part("\ud83d"))])
    assert caught.value.param == "messages[0].content[0].text"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"hello", UnsupportedMedia),
        (png(32, 32)[:20], TruncatedMedia),
        (png(32, 32)[:16] + struct.pack(">LL", 50_000, 50_000) + png(32, 32)[24:], MediaTooLarge),
        (png(32, 32)[:16] + struct.pack(">LL", 0, 5) + png(32, 32)[24:], BadMediaSize),
        (png(402, 2), BadMediaSize),
    ],
)
def test_bad_media_names_its_part(builder: PromptBuilder, data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        builder.build([user(text_part("a")), user(text_part("b"), image_part(data))])
    assert caught.value.param == "messages[1].content[1].image_url.url"  # type: ignore[attr-defined]


def test_too_long(shared_folder: Path) -> None:
    builder = PromptBuilder(shared_folder, context_length=50)
    with pytest.raises(PromptTooLong, match=r"length is 50 tokens. However, you requested \d{3} tokens \(\d{3} in"):
        builder.build([user(text_part("a" * 100))])
    with pytest.raises(PromptTooLong, match="length is 50 tokens"):
        builder.build([user(image_part(png(64, 64)))])
    assert PromptBuilder(shared_folder, context_length=10**6).context_length == 4096


def test_a_text_that_is_far_too_long_is_not_even_tokenized(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = PromptBuilder(shared_folder)
    monkeypatch.setattr(builder.tokenizer, "encode", lambda _: pytest.fail("it was tokenized"))
    with pytest.raises(
        PromptTooLong, match=r"length is 4096 tokens. However, you requested at least \d+ tokens"
    ) as caught:
        builder.build([user(text_part("a" * 10**6))])
    assert caught.value.param == "messages"


def test_a_template_that_looks_for_a_key_named_as_the_modality(folder: Path) -> None:
    """Not for a part's type, like the first ones of Qwen2-Audio."""
    (folder / "chat_template.jinja").write_text(
        "{% for part in messages[0].content %}"
        "{% if 'image' in part or 'image_url' in part %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    )
    builder = PromptBuilder(folder)
    assert builder.modalities == ["image"]
    assert len(builder.build([user(text_part("See"), image_part(png(64, 64)))]).items) == 1


def test_media_that_the_template_has_no_place_for(folder: Path) -> None:
    gif = clip("gif", frames=3)
    with pytest.raises(UnsupportedMedia, match="takes no videos") as caught:
        PromptBuilder(folder).build([user(text_part("a"), {"type": "video", "data": gif})])
    assert caught.value.param == "messages[0].content[1].video_url.url"
    (folder / "chat_template.jinja").write_text("no image")
    with pytest.raises(UnsupportedMedia, match="takes no images"):
        PromptBuilder(folder).build([user(image_part(png(64, 32)))])


def test_timestamps_stand_between_a_videos_frames(folder: Path) -> None:
    builder = builder_with_videos(folder)
    video = clip("mp4", frames=30, width=64, height=32)
    parts = text_part("a"), {"type": "video", "data": video}, image_part(png(64, 32)), text_part("b")
    prompt = builder.build([user(*parts)])
    moving, still = prompt.items
    assert len(moving.placement.spans) == moving.plan.num_parts == 3
    assert len(still.placement.spans) == 1
    tokens = [builder.tokenizer.token_of(token) for token in prompt.tokens]
    for span in moving.placement.spans:
        assert set(tokens[span.start : span.end]) == {"<|video_pad|>"}
        assert span.length == moving.plan.part_rows
        assert tokens[span.start - 1] == "<|vision_start|>"
        assert tokens[span.end] == "<|vision_end|>"
    first, second = moving.placement.spans[:2]
    between = builder.tokenizer.decode(prompt.tokens[first.end + 1 : second.start - 1])
    assert between == "<1.4 seconds>"
    moved = builder.build([user({"type": "video", "data": video, "sampling": FrameSampling(num_frames=4)})])
    assert sampled_frames(moved.items[0].plan) == (0, 10, 19, 29)
    assert moved.items[0].key != moving.key


@pytest.mark.parametrize("template", ["<|image_pad|><|image_pad|>"])
def test_template_that_misplaces_images(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InternalError, match=r"placed \d items of 1"):
        PromptBuilder(folder).build([user(image_part(png(32, 32)))])


def test_a_template_that_has_no_place_for_the_media_of_some_messages(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}"
        "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    builder = PromptBuilder(folder)
    content = [image_part(png(32, 32)), text_part("x")]
    assert builder.build([user(*content)]).items
    with pytest.raises(InvalidRequest, match="a place for 1 of 2 items"):
        builder.build([user(*content), {"role": "assistant", "content": content}])


def test_tokenizer_without_the_media_token(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"video_token_id": 999}))
    with pytest.raises(CheckpointError, match="no token 999"):
        PromptBuilder(folder)


def test_build_is_quick(builder: PromptBuilder) -> None:
    messages = [user(image_part(png(200, 100)), text_part("What is in this picture?"))]
    assert min(cpu_seconds(lambda: builder.build(messages)) for _ in range(30)) < 2e-3


@pytest.mark.parametrize(("family", "marker"), [("smolvlm", "<global-img>"), ("minicpmv4_6", "<slice>")])
def test_markers_around_tiles_are_the_templates_alone(tmp_path: Path, family: str, marker: str) -> None:
    folder = make_tiny(tmp_path, family)
    with pytest.raises(InvalidRequest, match=f"may not contain {marker}"):
        PromptBuilder(folder).build([user(f"Look: {marker}")])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["content"] != marker]
    write_json(folder / "tokenizer.json", tokenizer)
    with pytest.raises(CheckpointError, match="stands for media"):
        PromptBuilder(folder)
