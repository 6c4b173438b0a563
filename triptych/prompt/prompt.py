"""Messages to a planned prompt: tokens with placeholders expanded, positions, and the items that fill them."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.fingerprint import fingerprint, update_with_length
from triptych.errors import (
    CheckpointError,
    InternalError,
    InvalidRequest,
    MediaError,
    MediaNotServed,
    PromptTooLong,
    UnsupportedMedia,
)
from triptych.models.base import Planner, Positions
from triptych.models.registry import family_of, resolve
from triptych.prompt.caps import MediaBudget, MediaCaps
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.probe_video import probe_audio_track, probe_video
from triptych.prompt.reasoning import Reasoning, reasoning_at_end
from triptych.prompt.template import ChatTemplate
from triptych.prompt.tokenizer import Tokenizer
from triptych.types import MODEL_BOUNDS, MODEL_SAMPLING, ItemPlan, MediaHeader, Placement, Span

Message = Mapping[str, Any]
"""``role`` and ``content``: a string, None, or parts ``{"type": "text", "text": str}`` and
``{"type": "image", "data": bytes}``, or ``"video"`` or ``"audio"``; with ``bounds`` (PixelBounds) and, of a video,
``sampling`` (FrameSampling) if the model's own don't hold, ``heard`` if its sound shall be, and with ``field``, the
part's field that its bytes came from, unless that is its URL. Further keys go to the template as they are."""

PROBES: dict[str, Callable[[bytes], MediaHeader]] = {"image": probe_image, "video": probe_video, "audio": probe_audio}
"""What reads the header of each modality's files."""

PLURALS = {"image": "images", "video": "videos", "audio": "audio clips"}


@dataclass(frozen=True)
class PlannedItem:
    """One media item of a prompt. ``key`` names its embedding: 64 hexadecimal digits; ``param`` is the request's field
    it came from, for errors that are only found later."""

    key: str
    data: bytes
    plan: ItemPlan
    placement: Placement
    param: str


@dataclass(frozen=True)
class PlannedPrompt:
    """``tokens`` holds ``plan.rows`` placeholders for each item, at its placement; ``positions`` covers all tokens;
    ``reasoning`` says whether the answer begins with thoughts."""

    tokens: list[int]
    positions: Positions
    items: tuple[PlannedItem, ...] = ()
    reasoning: Reasoning = Reasoning.NONE


def media_param(message: int, part: int, field: str) -> str:
    """How errors name an item: the request's field that its bytes came from."""
    return f"messages[{message}].content[{part}].{field}"


class PromptBuilder:
    """Builds prompts for the model of a checkpoint folder.

    ``context_length`` is the longest prompt in tokens: the model's, or the given one where that is shorter. ``caps``
    bound the media of a request. ``modalities`` are those that the model takes and its template has a place for;
    ``audio_in_video`` says whether a video's sound can be heard with it.
    Raises CheckpointError for a folder that can't be served.
    """

    def __init__(self, folder: Path, context_length: int | None = None, caps: MediaCaps | None = None) -> None:
        folder = Path(folder)
        config = load_config(folder)
        self._family = family_of(config)
        self.planner: Planner = resolve(self._family.planner)(
            config, load_preprocessor_config(folder), load_video_config(folder)
        )
        self._caps = caps or MediaCaps()
        self.template = ChatTemplate(folder)
        self.tokenizer = Tokenizer(folder)
        self.fingerprint = fingerprint(folder)
        self.context_length: int = min(self.planner.context_length, context_length or self.planner.context_length)
        self._media_tokens = tuple(self._spelling(token_id) for token_id in sorted(self.planner.media_token_ids))
        self._modalities = {self._spelling(token): name for name, token in self.planner.placeholder_ids.items()}
        self._placeholder = re.compile("|".join(map(re.escape, self._modalities)) or r"(?!)")
        self.modalities = [name for spelling, name in self._modalities.items() if self._places(name, spelling)]
        self.audio_in_video = self.planner.audio_in_video and "video" in self.modalities

    def build(
        self,
        messages: Sequence[Message],
        context_length: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> PlannedPrompt:
        """Plans one request, in well under two milliseconds for a short one; reads media headers, decodes nothing.

        ``context_length`` is what there is room for now, if that is less than the builder's own.
        ``add_generation_prompt`` ends the prompt with what begins an answer, ``continue_final_message`` with the last
        message's text instead. ``template_variables`` go to the template, such as ``tools``.

        Raises InvalidRequest for text with the model's media tokens and for what the template refuses, MediaError for
        an item that can't be used (both name the field), PromptTooLong, and InternalError when the template places an
        item twice.
        """
        self._refuse_media_tokens(messages, "messages")
        for name, value in template_variables.items():
            self._refuse_media_tokens(value, name)
        media = list(self._plan_media(messages))
        plans = [plan for _, plan, _ in media]
        longest = min(self.context_length, context_length or self.context_length)
        _check_length(sum(plan.rows for plan in plans), longest, "messages", "more than ")
        shown = _without_data if self._family.takes_media else _as_text
        text = self.template.render(
            [shown(message) for message in messages],
            add_generation_prompt,
            continue_final_message,
            **template_variables,
        )
        rendered = self._encode(self._with_placeholders(text, plans), longest, "messages")
        runs = [length for plan in plans for length in self.planner.runs(plan)]
        if (placed := sum(map(rendered.count, self.planner.placeholder_ids.values()))) != len(runs):
            raise InternalError(f"the prompt has {placed} placeholders for {len(runs)} runs of rows")
        num_tokens = len(rendered) + sum(runs) - len(runs)
        _check_length(num_tokens, longest, "messages")
        tokens, spans = self._expand(rendered, runs)
        placements = _placements(spans, [len(self.planner.runs(plan)) for plan in plans])
        return PlannedPrompt(
            tokens=tokens,
            positions=self.planner.positions(num_tokens, placements, plans),
            items=tuple(
                PlannedItem(self._key(data, plan), data, plan, placement, param)
                for (data, plan, param), placement in zip(media, placements, strict=True)
            ),
            reasoning=reasoning_at_end(text) if self.template.supports_reasoning else Reasoning.NONE,
        )

    def build_text(
        self,
        prompt: str | Sequence[int],
        context_length: int | None = None,
        /,
        *,
        param: str = "prompt",
        add_special_tokens: bool = True,
    ) -> PlannedPrompt:
        """Plans a prompt without a template: a text, or tokens as they are. Raises InvalidRequest for the model's media
        tokens and for a prompt without tokens, and PromptTooLong; both name ``param``."""
        longest = min(self.context_length, context_length or self.context_length)
        if isinstance(prompt, str):
            self._refuse_media_tokens(prompt, param)
            tokens = self._encode(prompt, longest, param, add_special_tokens)
        else:
            tokens = list(prompt)
            if forbidden := self.planner.media_token_ids.intersection(tokens):
                raise InvalidRequest(f"{param} may not contain token {min(forbidden)}, which stands for media", param)
        if not tokens:
            raise InvalidRequest(f"{param} has no tokens", param)
        _check_length(len(tokens), longest, param)
        return PlannedPrompt(tokens=tokens, positions=self.planner.positions(len(tokens), [], []))

    def _encode(self, text: str, longest: int, param: str, add_special_tokens: bool = False) -> list[int]:
        # megabytes of text would take seconds to tokenize, only to be refused then
        _check_length(self.tokenizer.min_num_tokens(text), longest, param, "at least ")
        return self.tokenizer.encode(text, add_special_tokens)

    def _spelling(self, token_id: int) -> str:
        token = self.tokenizer.token_of(token_id)
        if not token:
            raise CheckpointError(f"tokenizer.json has no token {token_id}, which config.json gives to media")
        return token

    def _places(self, modality: str, placeholder: str) -> bool:
        """Whether the template has a place for media of a kind; one that can't say gets the benefit of the doubt."""
        try:
            return placeholder in self.template.render([{"role": "user", "content": [{"type": modality}]}])
        except InvalidRequest:
            return True

    def _refuse_media_tokens(self, value: Any, path: str) -> None:
        """Media tokens may come from the template only: from a client they would claim rows that don't exist.

        Templates put texts side by side, so a token that is split between texts counts too.
        """
        longest = max(map(len, self._media_tokens), default=0)
        before = ""
        for param, text, is_alone in _texts(value, path):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("the text is not valid Unicode: it has half of a surrogate pair", param) from None
            joined = text if is_alone else before + text
            for token in self._media_tokens:
                if token in joined:
                    raise InvalidRequest(f"the text may not contain {token}, which stands for media", param)
            if not is_alone:
                before = joined[-longest:] if longest else ""

    def _plan_media(self, messages: Sequence[Message]) -> Iterator[tuple[bytes, ItemPlan, str]]:
        counted = MediaBudget(self._caps)
        for i, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list):
                continue
            for j, part in enumerate(content):
                if part["type"] not in PROBES:
                    continue
                param = media_param(i, j, part.get("field", f"{part['type']}_url.url"))
                try:
                    plan = self._plan(part, counted)
                except MediaError as error:
                    error.param = param
                    raise
                yield part["data"], plan, param

    def _plan(self, part: Mapping[str, Any], counted: MediaBudget) -> ItemPlan:
        modality = part["type"]
        if not self._family.takes_media:
            raise MediaNotServed("this model takes text alone")
        if modality not in self.modalities:
            raise UnsupportedMedia(f"the model takes no {PLURALS[modality]}")
        header = PROBES[modality](part["data"])
        counted.add_header(header)
        sound = probe_audio_track(part["data"]) if part.get("use_audio") else None
        if sound is not None:
            counted.add_header(sound)
        view = part.get("bounds", MODEL_BOUNDS), part.get("sampling", MODEL_SAMPLING)
        plan = self.planner.plan(header, *view, sound)
        counted.add_plan(plan)
        return plan

    def _with_placeholders(self, text: str, plans: Sequence[ItemPlan]) -> str:
        """The rendered template with what stands for each item in the place of its placeholder. Raises InvalidRequest
        when the template leaves items out, and InternalError when it places them otherwise."""
        places = list(self._placeholder.finditer(text))
        placed = [self._modalities[place[0]] for place in places]
        if len(placed) < len(plans):
            # some have room for media in some messages only: those of users, say
            raise InvalidRequest(
                f"the model's chat template has a place for {len(placed)} of {len(plans)} items", "messages"
            )
        if placed != [plan.modality for plan in plans]:
            raise InternalError(f"the chat template placed {len(placed)} items of {len(plans)}, or in another order")
        pieces = []
        copied = 0
        for place, plan in zip(places, plans, strict=True):
            pieces += [text[copied : place.start()], self.planner.placeholder(plan, self._spelling)]
            copied = place.end()
        return "".join(pieces) + text[copied:]

    def _expand(self, rendered: Sequence[int], runs: Sequence[int]) -> tuple[list[int], list[Span]]:
        """Each placeholder becomes as many as its run has rows."""
        placeholders = frozenset(self.planner.placeholder_ids.values())
        tokens: list[int] = []
        spans: list[Span] = []
        for token in rendered:
            if token not in placeholders:
                tokens.append(token)
                continue
            spans.append(Span(start=len(tokens), length=runs[len(spans)]))
            tokens += [token] * spans[-1].length
        return tokens, spans

    def _key(self, data: bytes, plan: ItemPlan) -> str:
        """Hexadecimal 256-bit BLAKE3 digest of the model's fingerprint, the plan (MessagePack) and the item's bytes,
        each behind its length."""
        digest = blake3()
        for field in (self.fingerprint.encode(), msgspec.msgpack.encode(plan), data):
            update_with_length(digest, field)
        return digest.hexdigest()


def _placements(spans: Sequence[Span], counts: Sequence[int]) -> list[Placement]:
    """The spans of each item, which has so many of them."""
    rest = iter(spans)
    return [Placement(tuple(itertools.islice(rest, count))) for count in counts]


def _check_length(num_tokens: int, longest: int, param: str, qualifier: str = "") -> None:
    if num_tokens > longest:
        raise PromptTooLong(f"the prompt has {qualifier}{num_tokens} tokens; the context length is {longest}", param)


def _texts(value: Any, path: str, is_alone: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(path, text, is_alone) of every string within, in order, keys included. ``is_alone`` marks those that templates
    don't put beside other texts: keys, and the values of ``type`` and ``role``.
    """
    if isinstance(value, str):
        yield path, value, is_alone
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield path, key, True
            yield from _texts(member, f"{path}.{key}", key in ("type", "role"))
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from _texts(member, f"{path}[{i}]")


def _as_text(message: Message) -> dict[str, Any]:
    """The message as templates of text models know it: parts joined to one text, a line each."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _without_data(message: Message) -> dict[str, Any]:
    """The message as the template sees it: media by their type alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [{"type": part["type"]} if part["type"] in PROBES else part for part in content]}
